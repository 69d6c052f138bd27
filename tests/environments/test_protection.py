"""Agent code is kept from the answers: its restriction is checked, and it does not learn where the data lies."""

import pytest

from gvpo_trl.environments.appworld import AppWorldEnvironments
from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.environments.appworld.engine.agents import host as agents
from gvpo_trl.environments.appworld.hosts import Launch
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


class Unrestricted(Launch):
    """Starts a host of interpreters that say they are restricted and are not."""

    def command(self, *arguments: str) -> list[str]:
        code = (
            "import runpy, sys\n"
            f"runpy.run_path({boot.__file__!r})['load_package']()\n"
            f"from {agents.__package__} import host\n"
            "host.sandbox.restrict = lambda **options: ('landlock-7', 'seccomp')\n"
            "sys.argv[0:1] = ['host']\n"
            "host.main()"
        )
        return [str(self.python), "-I", "-c", code, *arguments]


def test_an_interpreter_that_is_not_restricted_runs_no_agent_code(own, task):
    if own.sandbox != "full":
        pytest.skip("this kernel cannot restrict the interpreter in full")
    keeper = own.machinery.agents
    launch = keeper.launch
    keeper.launch = Unrestricted(**vars(launch))
    keeper.host.close()
    try:
        with pytest.raises(EpisodeFault, match="not restricted as it should be"):
            own.open(task)
    finally:
        keeper.launch = launch
        keeper.host.close()
    with own.open(task) as episode:
        assert episode.step("print(1)").failure is None


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
