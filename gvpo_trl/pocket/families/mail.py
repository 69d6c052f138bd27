"""Families of tasks on gmail."""

from .base import (
    DONE,
    Effect,
    Family,
    Slip,
    added,
    docs,
    docs_slips,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
)
from .vocabulary import person


def _find(values: dict) -> str:
    return f'u = apis.gmail.search_users(query="{values["receiver"]}")[0]\nprint(u["first_name"], u["email"])'


def _send_end(values: dict) -> str:
    return (
        f'apis.gmail.send_email(email_addresses=[u["email"]], subject="{values["subject"]}", '
        f'body="{values["body"]}", access_token=token)\n{DONE}'
    )


def _new_email(values: dict) -> list[Effect]:
    sender, receiver = person(values["supervisor"]).id, person(values["receiver"]).id
    kept = {"label": None, "starred": False, "archived": False, "spam": False, "has_attachments": False}
    copies = [added("gmail.UserEmailThread", user_id=user, read=user == sender, **kept) for user in (sender, receiver)]
    email = added("gmail.Email", sender_id=sender, response_to_email_id=None)
    return [email, added("gmail.GlobalEmailThread"), *copies]


MAIL_SEND = Family(
    name="mail_send",
    apps=("gmail",),
    difficulty=2,
    phrases=(
        "With send_email of gmail, write to {receiver}. The subject is {subject}, the body is {body}.",
        "Use send_email of gmail to send {receiver} an email with subject {subject} and body {body}.",
    ),
    draw=lambda draw: {"receiver": draw.name(), "subject": draw.word(), "body": draw.word()},
    rows=lambda values: [],
    turns=lambda values: [docs("gmail", "send_email"), login("gmail"), _find(values), _send_end(values)],
    slips=lambda values: [
        docs_slips("gmail", "send_email"),
        login_slips("gmail"),
        [
            swap(_find(values), 'u["first_name"]', 'u["name"]', "wrong key"),
            swap(_find(values), "search_users", "search_contacts", "an API that is not there"),
        ],
        [
            swap(_send_end(values), "email_addresses=", "to=", "wrong argument name"),
            swap(_send_end(values), "email_addresses=", "email_address=", "wrong argument name"),
            swap(_send_end(values), '[u["email"]]', f'["{values["receiver"]}"]', "a name where an address belongs"),
            no_token(_send_end(values)),
            misspelt_token(_send_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_send_end(values), f'body="{values["body"]}"', f'body="{values["subject"]}"', "wrong body"),
        swap(_send_end(values), f'subject="{values["subject"]}"', 'subject=""', "no subject"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"receiver_id": person(values["receiver"]).id},
    effects=_new_email,
    changes='email = only(models.changed_records("gmail.Email")[0], sender_id=main_user.id)',
    checks=(
        equal("One email went to the right person.", "email.recipient_ids", '[private_data["receiver_id"]]'),
        equal("The email has the wanted subject.", "email.subject", 'public_data["subject"]'),
        equal("The email has the wanted body.", "email.body", 'public_data["body"]'),
    ),
    documented=("gmail", "send_email"),
)

FAMILIES = (MAIL_SEND,)
