"""The accounts of the pocket data: passwords that nobody can guess, and the senders of verification codes."""

import pytest

from gvpo_trl.pocket import base_data, families
from gvpo_trl.pocket.families.vocabulary import LOGIN_APPS
from tests.pocket import support

SENDER_APPS = ("gmail", "file_system", "phone")
"""Apps in which AppWorld's senders of codes have accounts."""
PUBLISHED_PASSWORD = "adminpassword"
"""What AppWorld's source gives as the password of all senders."""


def senders(root, app: str) -> list:
    return [row for row in support.users(root, app) if row["id"] > len(families.PEOPLE)]


def test_no_password_follows_from_what_a_world_shows(pocket_root):
    passwords = []
    for app in LOGIN_APPS:
        for row in support.users(pocket_root, app):
            passwords.append(row["password"])
            assert len(row["password"]) == base_data.PASSWORD_LENGTH
            for shown in (row["first_name"], row["last_name"], app, PUBLISHED_PASSWORD):
                assert shown.lower() not in row["password"], (app, row["first_name"])
    assert len(set(passwords)) == len(passwords) >= len(LOGIN_APPS) * len(families.PEOPLE)


def test_another_seed_gives_other_passwords():
    assert base_data.password(0, "venmo", "a@b.cd") != base_data.password(1, "venmo", "a@b.cd")
    assert base_data.password(0, "venmo", "a@b.cd") != base_data.password(0, "gmail", "a@b.cd")


def test_the_supervisor_is_told_the_passwords_that_open_the_accounts(environments, pocket_root):
    task_id, values = support.first_tasks(pocket_root)["note_answer"]
    own = families.person(values["supervisor"])
    with environments.open(task_id) as episode:
        shown = episode.step('print([a["password"] for a in apis.supervisor.show_account_passwords()])').text
    for app in LOGIN_APPS:
        assert support.users(pocket_root, app)[own.id - 1]["password"] in shown


@pytest.mark.parametrize("app", SENDER_APPS)
def test_a_sender_of_codes_can_neither_be_signed_up_for_nor_logged_in_as(environments, pocket_root, app):
    field = "phone_number" if app == "phone" else "email"
    addresses = [row[field] for row in senders(pocket_root, app)]
    assert len(addresses) == len(LOGIN_APPS)
    code = f"""
for address in {addresses!r}:
    try:
        apis.{app}.signup(first_name="A", last_name="B", {field}=address, password="mine-alone")
        print("signed up", address)
    except Exception as error:
        print("refused" if "status code is 4" in str(error) else error)
    for password in ("mine-alone", "{PUBLISHED_PASSWORD}"):
        try:
            apis.{app}.login(username=address, password=password)
            print("logged in", address)
        except Exception as error:
            print("refused" if "status code is 4" in str(error) else error)
"""
    with environments.open(support.task_ids(pocket_root, "train")[0]) as episode:
        assert episode.step(code).text.split() == ["refused"] * 3 * len(addresses)


def test_a_code_reaches_its_owner_by_mail(environments, pocket_root):
    """A control: the senders' accounts are the ones that AppWorld sends codes from."""
    code = """
own = apis.supervisor.show_profile()["email"]
apis.venmo.send_password_reset_code(email=own)
pw = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = apis.gmail.login(username=own, password=pw["gmail"])["access_token"]
print([thread["participants"] for thread in apis.gmail.show_inbox_threads(access_token=token)])
"""
    with environments.open(support.task_ids(pocket_root, "train")[0]) as episode:
        text = episode.step(code).text
    assert "notifications@venmo.com" in text, text
