"""Families of tasks on venmo."""

from .base import (
    DONE,
    Effect,
    Family,
    Row,
    Slip,
    added,
    among,
    docs,
    docs_slips,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
    updated,
)
from .notes import note, read_note, read_note_slips
from .vocabulary import person


def _find_user(name: str) -> str:
    return f'u = apis.venmo.search_users(query="{name}", access_token=token)[0]\nprint(u["first_name"], u["email"])'


def _find_user_slips(name: str) -> list[Slip]:
    code = _find_user(name)
    return [
        no_token(code),
        misspelt_token(code),
        swap(code, "search_users", "find_user", "an API that is not there"),
        swap(code, 'u["first_name"]', 'u["name"]', "wrong key"),
    ]


def _pay_end(values: dict) -> str:
    return (
        f'apis.venmo.create_transaction(receiver_email=u["email"], amount={values["amount"]}, '
        f'description="{values["reason"]}", access_token=token)\n{DONE}'
    )


def _new_payment(sender: str, receiver: str) -> list[Effect]:
    """Expect a payment from one balance to another, and the receiver's notification."""
    people = (person(sender).id, person(receiver).id)
    return [
        added(
            "venmo.Transaction",
            sender_id=people[0],
            receiver_id=people[1],
            private=False,
            payment_card_digits=None,
            receipt_download_count=0,
        ),
        *(updated("venmo.User", user, "venmo_balance") for user in people),
        added("venmo.Notification", user_id=people[1]),
    ]


VENMO_PAY = Family(
    name="venmo_pay",
    apps=("venmo",),
    difficulty=2,
    phrases=(
        "With create_transaction of venmo, send {receiver} {amount} dollars. The description is {reason}.",
        "Use create_transaction of venmo to pay {amount} dollars to {receiver} with the description {reason}.",
    ),
    draw=lambda draw: {"receiver": draw.name(), "amount": draw.number(), "reason": draw.word()},
    rows=lambda values: [],
    turns=lambda values: [
        docs("venmo", "create_transaction"),
        login("venmo"),
        _find_user(values["receiver"]),
        _pay_end(values),
    ],
    slips=lambda values: [
        docs_slips("venmo", "create_transaction"),
        login_slips("venmo"),
        _find_user_slips(values["receiver"]),
        [
            swap(_pay_end(values), "receiver_email=", "email=", "wrong argument name"),
            swap(_pay_end(values), "receiver_email=", "user_email=", "wrong argument name"),
            swap(_pay_end(values), 'u["email"]', f'"{values["receiver"]}"', "a name where an address belongs"),
            no_token(_pay_end(values)),
            misspelt_token(_pay_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_pay_end(values), "description=", "note=", "an argument that is ignored"),
        swap(_pay_end(values), f', description="{values["reason"]}"', "", "no description"),
        swap(_pay_end(values), f"amount={values['amount']}", "amount=1", "wrong amount"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"receiver_id": person(values["receiver"]).id},
    effects=lambda values: _new_payment(values["supervisor"], values["receiver"]),
    changes='payment = only(models.changed_records("venmo.Transaction")[0], sender_id=main_user.id)',
    checks=(
        equal("One payment went to the right person.", "payment.receiver_id", 'private_data["receiver_id"]'),
        equal("The payment is as high as asked.", "payment.amount", 'public_data["amount"]'),
        equal("The payment has the wanted description.", "payment.description", 'public_data["reason"]'),
    ),
    documented=("venmo", "create_transaction"),
)


def _requests(values: dict) -> list[Row]:
    receiver = person(values["supervisor"]).id
    return [
        Row(
            "venmo",
            "PaymentRequest",
            {
                "sender_id": person(name).id,
                "receiver_id": receiver,
                "amount": amount,
                "description": reason,
                "created_at": f"2023-05-{10 + position}T09:00:00",
            },
        )
        for position, (name, amount, reason) in enumerate(values["requests"])
    ]


SHOW_REQUESTS = (
    "for r in apis.venmo.show_received_payment_requests(access_token=token):\n"
    '    print(r["payment_request_id"], r["sender"]["name"])'
)


def _request_id(values: dict, name: str) -> int:
    return 1 + [sender for sender, _, _ in values["requests"]].index(name)


def _requests_end(values: dict, approve: int | None = None, deny: int | None = None) -> str:
    approve = approve or _request_id(values, values["approved"])
    deny = deny or _request_id(values, values["denied"])
    return (
        f"apis.venmo.approve_payment_request(payment_request_id={approve}, access_token=token)\n"
        f"apis.venmo.deny_payment_request(payment_request_id={deny}, access_token=token)\n{DONE}"
    )


def _draw_requests(draw) -> dict:
    approved, denied, other = draw.name(), draw.name(), draw.name()
    requests = [[name, draw.number(), draw.word()] for name in draw.shuffled([approved, denied, other])]
    return {"approved": approved, "denied": denied, "other": other, "requests": requests}


REQUESTS_SORT = Family(
    name="requests_sort",
    apps=("venmo",),
    difficulty=2,
    phrases=(
        "On Venmo, approve the payment request from {approved} and deny the one from {denied}.",
        "Accept the Venmo payment request of {approved}. Deny the request of {denied}.",
    ),
    draw=_draw_requests,
    rows=_requests,
    turns=lambda values: [login("venmo"), SHOW_REQUESTS, _requests_end(values)],
    slips=lambda values: [
        login_slips("venmo"),
        [
            no_token(SHOW_REQUESTS),
            misspelt_token(SHOW_REQUESTS),
            swap(SHOW_REQUESTS, 'r["payment_request_id"]', 'r["id"]', "wrong key"),
            swap(SHOW_REQUESTS, "show_received_payment_requests", "show_payment_requests", "an API that is not there"),
        ],
        [
            swap(_requests_end(values), "payment_request_id=", "request_id=", "wrong argument name"),
            no_token(_requests_end(values)),
            misspelt_token(_requests_end(values)),
            Slip(_requests_end(values, approve=99), "an id that is not there"),
        ],
    ],
    wrong_ends=lambda values: [
        Slip("\n".join(_requests_end(values).splitlines()[::2]), "only approved"),
        Slip("\n".join(_requests_end(values).splitlines()[1:]), "only denied"),
        Slip(_requests_end(values, deny=_request_id(values, values["other"])), "wrong request denied"),
        Slip(DONE, "nothing done"),
    ],
    effects=lambda values: [
        *_new_payment(values["supervisor"], values["approved"]),
        updated("venmo.PaymentRequest", _request_id(values, values["approved"]), "approved_at"),
        updated("venmo.PaymentRequest", _request_id(values, values["denied"]), "denied_at"),
        added("venmo.Notification", user_id=person(values["denied"]).id),
    ],
    facts=lambda values: {
        "approved_id": person(values["approved"]).id,
        "denied_id": person(values["denied"]).id,
    },
    changes=(
        "requests = [r for r in models.end.venmo.PaymentRequest.all() if r.receiver_id == main_user.id]\n"
        "approved = {r.sender_id for r in requests if r.approved_at is not None}\n"
        "denied = {r.sender_id for r in requests if r.denied_at is not None}"
    ),
    checks=(
        among("The wanted request was approved.", 'private_data["approved_id"]', "approved"),
        among("The wanted request was denied.", 'private_data["denied_id"]', "denied"),
    ),
)


def _ask_end(values: dict) -> str:
    return (
        f'u = apis.venmo.search_users(query="{values["debtor"]}", access_token=token)[0]\n'
        f'apis.venmo.create_payment_request(user_email=u["email"], amount={values["amount"]}, access_token=token)\n'
        f"{DONE}"
    )


NOTE_REQUEST = Family(
    name="note_request",
    apps=("simple_note", "venmo"),
    difficulty=3,
    phrases=(
        "My note {title} says who owes me how many dollars. Request that money on Venmo.",
        "Read my note {title}: a name and an amount. Send this person a Venmo payment request for it.",
    ),
    draw=lambda draw: {
        "title": draw.word(),
        "debtor": draw.name(),
        "amount": draw.number(),
        "other_title": draw.word(),
        "other_debtor": draw.name(),
        "other_amount": draw.number(),
    },
    rows=lambda values: [
        note(values, values["title"], f"{values['debtor']} {values['amount']}"),
        note(values, values["other_title"], f"{values['other_debtor']} {values['other_amount']}"),
    ],
    turns=lambda values: [login("simple_note"), read_note(values["title"]), login("venmo"), _ask_end(values)],
    slips=lambda values: [
        login_slips("simple_note"),
        read_note_slips(values["title"]),
        login_slips("venmo"),
        [
            swap(_ask_end(values), "user_email=", "receiver_email=", "wrong argument name"),
            swap(_ask_end(values), 'u["email"]', f'"{values["debtor"]}"', "a name where an address belongs"),
            no_token(_ask_end(values)),
            misspelt_token(_ask_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_ask_end(values), f"amount={values['amount']}", f"amount={values['other_amount']}", "wrong amount"),
        swap(_ask_end(values), f'"{values["debtor"]}"', f'"{values["other_debtor"]}"', "wrong person"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"debtor_id": person(values["debtor"]).id},
    effects=lambda values: [
        added(
            "venmo.PaymentRequest",
            sender_id=person(values["supervisor"]).id,
            receiver_id=person(values["debtor"]).id,
            private=False,
        ),
        added("venmo.Notification", user_id=person(values["debtor"]).id),
    ],
    changes='request = only(models.changed_records("venmo.PaymentRequest")[0], sender_id=main_user.id)',
    checks=(
        equal(
            "One payment request went to the person in the note.", "request.receiver_id", 'private_data["debtor_id"]'
        ),
        equal("The request asks for the amount in the note.", "request.amount", 'public_data["amount"]'),
    ),
)

FAMILIES = (VENMO_PAY, REQUESTS_SORT, NOTE_REQUEST)
