"""Collateral damage in the pocket tasks: whatever an agent changes beyond what was asked costs a test."""

import collections
from pathlib import Path

import pytest

from gvpo_trl.pocket import families
from gvpo_trl.pocket.families import base
from tests.pocket import support

RECORD = {
    "amazon": "apis.amazon.add_product_to_cart(product_id=1, quantity=1, access_token=t)",
    "phone": 'apis.phone.create_alarm(time="05:00", label="Zed", access_token=t)',
    "file_system": 'apis.file_system.create_file(file_path="~/Zed.txt", content="Zed", access_token=t)',
    "spotify": 'apis.spotify.create_playlist(title="Zed", access_token=t)',
    "venmo": 'apis.venmo.create_transaction(receiver_email="{bystander}", amount=1, access_token=t)',
    "gmail": 'apis.gmail.send_email(email_addresses=["{bystander}"], subject="Zed", body="Zed", access_token=t)',
    "splitwise": 'apis.splitwise.create_group(name="Zed", member_emails=[], access_token=t)',
    "simple_note": 'apis.simple_note.create_note(title="Zed", content="Zed", access_token=t)',
    "todoist": 'apis.todoist.create_project(name="Zed", access_token=t)',
}
"""How a user whose token is `t` makes a record in each app."""
CLEARED = {
    "simple_note": (
        "for n in apis.simple_note.search_notes(access_token=t):\n"
        '    apis.simple_note.delete_note(note_id=n["note_id"], access_token=t)'
    ),
    "phone": (
        "for c in apis.phone.search_contacts(access_token=t):\n"
        '    apis.phone.delete_contact(contact_id=c["contact_id"], access_token=t)\n'
        "for m in apis.phone.search_text_messages(access_token=t):\n"
        '    apis.phone.delete_text_message(text_message_id=m["text_message_id"], access_token=t)'
    ),
    "venmo": (
        "for r in apis.venmo.show_received_payment_requests(access_token=t):\n"
        '    if r["sender"]["email"] == "{other_sender}":\n'
        '        apis.venmo.deny_payment_request(payment_request_id=r["payment_request_id"], access_token=t)'
    ),
    "spotify": (
        "for p in apis.spotify.show_playlist_library(access_token=t):\n"
        '    apis.spotify.delete_playlist(playlist_id=p["playlist_id"], access_token=t)'
    ),
    "todoist": (
        "for p in apis.todoist.show_projects(access_token=t):\n"
        '    for x in apis.todoist.show_tasks(project_id=p["project_id"], access_token=t)["no_section_tasks"]:\n'
        '        if x["title"] != "{task}":\n'
        '            apis.todoist.delete_task(task_id=x["task_id"], access_token=t)'
    ),
}
"""How a user whose token is `t` loses what a task's own records are in each app, but for the records asked for."""

UNASKED = {
    "note_create": ("pinned=True", 'pinned=True, tags=["zed"]'),
    "venmo_pay": ("amount=", "private=True, amount="),
    "alarm_set": ("time=", "enabled=False, time="),
    "playlist_make": ("title=", "is_public=True, title="),
    "note_request": ("amount=", "private=True, amount="),
    "file_write": ("~/", "/home/"),
    "cart_add": (
        base.DONE,
        f'apis.amazon.add_gift_wrapping_to_product(product_id=product["product_id"], access_token=token)\n{base.DONE}',
    ),
    "mail_send": (
        base.DONE,
        "sent = apis.gmail.show_outbox_threads(access_token=token)[0]\n"
        'apis.gmail.mark_thread_spam(email_thread_id=sent["email_thread_id"], access_token=token)\n'
        f"{base.DONE}",
    ),
}
"""By family, a change of the last turn that gives the new record a setting that nobody asked for."""


def log_in(root: Path, app: str, person: families.Person, variable: str = "t") -> str:
    """Code that logs a person in with the password that the database holds."""
    username = person.phone_number if app == "phone" else person.email
    password = support.users(root, app)[person.id - 1]["password"]
    return f'{variable} = apis.{app}.login(username="{username}", password="{password}")["access_token"]\n'


def harms(root: Path, family: families.Family, values: families.Values) -> dict[str, str]:
    """Code that leaves the solution of a task as it is, and harms somebody besides; by what it does."""
    owner = family.supervisor(values)
    met = {*support.leaves(values), owner.first_name}
    other, bystander = [person for person in families.PEOPLE if person.first_name not in met][:2]
    app = family.apps[-1]
    unrelated = next(name for name in RECORD if name not in family.apps)
    names = {"bystander": bystander.email, "task": values.get("task")}
    names["other_sender"] = families.person(values["other"]).email if "other" in values else None
    found = {
        "the account renamed": f'apis.{app}.update_account_name(first_name="Zed", access_token=t)',
        "a record more": RECORD[app].format(**names),
    }
    for row_app in sorted({row.app for row in family.rows(values)}):
        code = CLEARED[row_app].format(**names)
        found[f"the records of {row_app} deleted"] = log_in(root, row_app, owner) + code
    found = {label: code if ".login(" in code else log_in(root, app, owner) + code for label, code in found.items()}
    found["another user's record"] = log_in(root, app, other) + RECORD[app].format(**names)
    found["a record of another app"] = log_in(root, unrelated, owner) + RECORD[unrelated].format(**names)
    found["an account of another app deleted"] = (
        log_in(root, unrelated, owner) + f"apis.{unrelated}.delete_account(access_token=t)"
    )
    return found


def plays_of(root: Path, experiment: str) -> list[dict]:
    """Of each family one task, solved with each harm before its last turn, and solved from another user's account."""
    plays = []
    for name, (task_id, values) in support.first_tasks(root).items():
        family = families.FAMILIES[name]
        turns = family.turns(values)
        codes = {label: [*turns[:-1], harm, turns[-1]] for label, harm in harms(root, family, values).items()}
        logins = [position for position, turn in enumerate(turns) if ".login(" in turn]
        if logins and family.answer(values) is None:
            other = next(item for item in families.PEOPLE if item.first_name not in support.leaves(values))
            swapped = log_in(root, family.apps[-1], other, "token")
            codes["from another user's account"] = [*turns[: logins[-1]], swapped, *turns[logins[-1] + 1 :]]
        for number, (label, code) in enumerate(codes.items()):
            play = {"task": task_id, "family": name, "tag": "collateral", "label": label, "turns": code}
            plays.append({**play, "experiment": f"{experiment}_{number}"})
    return plays


@pytest.fixture(scope="module")
def played(pocket_root: Path, appworld_venv: Path, experiment: str) -> list[dict]:
    return support.run_plays(pocket_root, appworld_venv, plays_of(pocket_root, experiment))


@pytest.mark.slow
class TestAppWorldsOwnEngine:
    def test_every_harm_is_done_and_costs_a_test_in_every_family(self, played):
        labels = collections.defaultdict(set)
        for record in played:
            labels[record["family"]].add(record["label"])
            assert record["after"]["passed"] < record["after"]["total"], record
            if record["label"] != "from another user's account":
                assert not [text for text in record["texts"][:-1] if text.startswith("Execution failed")], record
                assert record["completed"], record
        assert labels.keys() == families.FAMILIES.keys()
        assert all(len(found) >= 5 for found in labels.values()), labels

    def test_harm_elsewhere_costs_the_one_test_and_no_other(self, played):
        for record in played:
            if record["label"] in ("a record of another app", "an account of another app deleted"):
                assert record["after"]["passed"] == record["after"]["total"] - 1, record

    def test_a_solution_from_another_users_account_earns_nothing(self, played):
        found = [record for record in played if record["label"] == "from another user's account"]
        assert len(found) == len(families.FAMILIES) - 2  # Two families ask for an answer alone.
        for record in found:
            assert record["after"]["passed"] == 0, record
        # A control: most of these attempts run to their end, so it is the tests of the data that refuse them.
        whole = [r for r in found if not any(text.startswith("Execution failed") for text in r["texts"])]
        assert len(whole) >= 10


@pytest.mark.parametrize("name", ["note_answer", "note_create", "venmo_pay", "song_keep"])
def test_an_episode_scores_the_honest_solution_higher_than_the_harm(environments, pocket_root, name):
    task_id, values = support.first_tasks(pocket_root)[name]
    family = families.FAMILIES[name]
    turns = family.turns(values)
    rewards = {}
    for label, harm in {"honest": "pass", **harms(pocket_root, family, values)}.items():
        with environments.open(task_id) as episode:
            for code in [*turns[:-1], harm, turns[-1]]:
                episode.step(code)
            rewards[label] = episode.score().reward
    assert rewards.pop("honest") == 1.0
    assert max(rewards.values()) < 1.0, rewards


@pytest.mark.parametrize("name", UNASKED)
def test_a_setting_of_the_new_record_that_nobody_asked_for_costs_the_last_test_alone(environments, pocket_root, name):
    task_id, values = support.first_tasks(pocket_root)[name]
    turns = families.FAMILIES[name].turns(values)
    old, new = UNASKED[name]
    assert old in turns[-1]
    with environments.open(task_id) as episode:
        steps = [episode.step(code) for code in [*turns[:-1], turns[-1].replace(old, new, 1)]]
        assert episode.score().failed == (base.EXACTLY,)
    assert [step.failure for step in steps] == [None] * len(steps)
