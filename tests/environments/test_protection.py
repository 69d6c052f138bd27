"""Agent code is kept from the answers: its restriction is checked, and it does not learn where the data lies."""

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.protection import Protection
from gvpo_trl.faults import EpisodeFault, SetupError
from tests.environments.support import split_ids

LACKS = ["no Landlock: allow its system calls"]


@pytest.fixture(scope="module")
def own(pocket_root, appworld_venv):
    """Episodes whose hosts this module may end."""
    with AppWorldEnvironments(pocket_root, rehearse=False, venv=appworld_venv, max_episodes=2) as environments:
        yield environments.start()


@pytest.fixture
def task(pocket_root):
    return split_ids(pocket_root)[0]


@pytest.mark.parametrize("level", ["none", "partial"])
def test_a_kernel_that_offers_too_little_is_said_once_or_refused(caplog, level):
    strict = Protection(sandboxed=True, required=True)
    with pytest.raises(SetupError, match=f"level here is '{level}': {LACKS[0]}"):
        strict.learn(level, LACKS)
    lenient = Protection(sandboxed=True, required=False)
    lenient.learn(level, LACKS)
    lenient.learn(level, LACKS)
    lenient.check_self_test(["read the canary"])
    assert caplog.text.count("AGENT CODE IS NOT FULLY SANDBOXED") == 1 and level in str(lenient)
    strict.level = "full"
    with pytest.raises(EpisodeFault, match="read the canary"):
        strict.check_self_test(["read the canary"])


def test_agent_code_beside_its_world_is_said_once(caplog):
    protection = Protection(sandboxed=False, required=False)
    protection.warn()
    protection.warn()
    assert caplog.text.count("agent code runs beside the world and can read the answers") == 1


SEARCH = """
os, gc, sys = __import__("os"), __import__("gc"), __import__("sys")
beginning = {reversed!r}[::-1]  # this code must not hold what it looks for
gc.unfreeze()
texts = [*os.environ.values(), os.getcwd(), *sys.path, *sys.argv]
for holder in gc.get_objects():
    if type(holder) is dict:
        texts += [*holder, *holder.values()]
    elif type(holder) in (list, tuple, set):
        texts += holder
print("found", *sorted({{text for text in texts if type(text) is str and beginning in text and text != beginning}}))
"""


def known_paths(episode, path):
    """What an interpreter finds in its memory that begins like the path."""
    result = episode.step(SEARCH.format(reversed=str(path)[-2::-1]))
    assert result.failure is None, result.text
    return result.text


def test_an_interpreter_does_not_know_where_the_data_lies(own, pocket_root, task):
    canary = str(own.machinery.workspace.canary)
    with own.open(task) as episode:
        assert known_paths(episode, canary) == f"found {canary}\n", "the search finds what is there"
        assert known_paths(episode, pocket_root) == "found\n"
