"""Families of tasks on simple_note."""

from .base import (
    CHALLENGE_SPLITS,
    DONE,
    Effect,
    Family,
    Row,
    Slip,
    added,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
)
from .vocabulary import person


def note(values: dict, title: str, content: str) -> Row:
    """Make a note of the supervisor."""
    owner = person(values["supervisor"]).id
    return Row(
        "simple_note", "Note", {"user_id": owner, "title": title, "content": content, "tags": [], "pinned": False}
    )


def new_note(values: dict) -> Effect:
    """Expect one more note of the supervisor, without tags."""
    return added("simple_note.Note", user_id=person(values["supervisor"]).id, tags=[])


def read_note(title: str) -> str:
    """Write a turn that prints the content of a note."""
    return (
        f'note = apis.simple_note.search_notes(query="{title}", access_token=token)[0]\n'
        'print(apis.simple_note.show_note(note_id=note["note_id"], access_token=token)["content"])'
    )


def read_note_slips(title: str) -> list[Slip]:
    """Write turns that fail to read a note."""
    code = read_note(title)
    return [
        no_token(code),
        misspelt_token(code),
        swap(code, "note_id=", "id=", "wrong argument name"),
        swap(code, 'note_id=note["note_id"]', f'note_id="{title}"', "a title where an id belongs"),
        swap(code, 'note["note_id"]', 'note["id"]', "wrong key"),
    ]


def _answer_end(values: dict) -> str:
    return f'apis.supervisor.complete_task(answer="{values["item"]} {values["price"]}")'


NOTE_ANSWER = Family(
    name="note_answer",
    apps=("simple_note",),
    difficulty=1,
    phrases=(
        "My note {title} names an item and its price. Answer with the item and the price.",
        "Which item and which price are in my note {title}? Give both.",
        "Look into the note {title} and tell me the item and the price in it.",
    ),
    draw=lambda draw: {
        "title": draw.word(),
        "item": draw.word(),
        "price": draw.number(),
        "other_title": draw.word(),
        "other_item": draw.word(),
        "other_price": draw.number(),
    },
    rows=lambda values: [
        note(values, values["other_title"], f"{values['other_item']} {values['other_price']}"),
        note(values, values["title"], f"{values['item']} {values['price']}"),
    ],
    turns=lambda values: [login("simple_note"), read_note(values["title"]), _answer_end(values)],
    slips=lambda values: [
        login_slips("simple_note"),
        read_note_slips(values["title"]),
        [
            swap(_answer_end(values), "complete_task", "complete", "an API that is not there"),
            Slip(f"apis.supervisor.complete_task(answer={values['item']})", "undefined name"),
            swap(_answer_end(values), '")', '"', "no closing bracket"),
        ],
    ],
    wrong_ends=lambda values: [
        Slip(f'apis.supervisor.complete_task(answer="{values["title"]} {values["price"]}")', "wrong item"),
        Slip(f'apis.supervisor.complete_task(answer="{values["other_item"]} {values["other_price"]}")', "wrong note"),
        swap(_answer_end(values), "answer=", "result=", "an argument that is ignored"),
        Slip(DONE, "no answer"),
    ],
    answer=lambda values: f"{values['item']} {values['price']}",
    effects=lambda values: [],
    changes="words = answer_words(models)",
    checks=(
        equal(
            "The answer gives two things, the item first.",
            "[len(words), *words[:1]]",
            '[2, public_data["item"].lower()]',
        ),
        equal(
            "The answer gives two things, the price last.",
            "[len(words), *words[-1:]]",
            '[2, str(public_data["price"])]',
        ),
    ),
)


def _create_end(values: dict) -> str:
    return (
        f'apis.simple_note.create_note(title="{values["title"]}", content="{values["content"]}", pinned=True, '
        f"access_token=token)\n{DONE}"
    )


NOTE_CREATE = Family(
    name="note_create",
    apps=("simple_note",),
    difficulty=1,
    phrases=(
        "Write a note titled {title} with the content {content} and pin it.",
        "Make a pinned note: title {title}, content {content}.",
        "I need a new note named {title} that says {content}. Keep it pinned.",
    ),
    draw=lambda draw: {"title": draw.word(), "content": draw.word(), "other_title": draw.word()},
    rows=lambda values: [note(values, values["other_title"], values["other_title"])],
    turns=lambda values: [login("simple_note"), _create_end(values)],
    slips=lambda values: [
        login_slips("simple_note"),
        [
            no_token(_create_end(values)),
            misspelt_token(_create_end(values)),
            swap(_create_end(values), "content=", "text=", "wrong argument name"),
            swap(_create_end(values), "create_note", "add_note", "an API that is not there"),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_create_end(values), ", pinned=True", "", "not pinned"),
        swap(_create_end(values), "pinned=", "pin=", "an argument that is ignored"),
        swap(_create_end(values), f'content="{values["content"]}"', f'content="{values["title"]}"', "wrong content"),
        Slip(DONE, "nothing done"),
    ],
    effects=lambda values: [new_note(values)],
    changes='note = only(models.changed_records("simple_note.Note")[0], user_id=main_user.id)',
    checks=(
        equal("One note was added, with the wanted title.", "note.title", 'public_data["title"]'),
        equal("The new note has the wanted content.", "note.content", 'public_data["content"]'),
        equal("The new note is pinned.", "note.pinned", "True"),
    ),
)


def _last_text(values: dict) -> str:
    return (
        f'm = apis.phone.search_text_messages(query="{values["sender"]}", access_token=token)[0]\nprint(m["message"])'
    )


def _keep_end(values: dict) -> str:
    return (
        f'apis.simple_note.create_note(title="{values["title"]}", content="{values["message"]}", '
        f"access_token=token)\n{DONE}"
    )


def _text(values: dict, sender: str, message: str) -> list[Row]:
    owner = person(values["supervisor"]).id
    sent = {"sender_id": person(sender).id, "receiver_id": owner, "message": message}
    copy = {"global_text_message_id": f"@{sender}"}
    return [
        Row("phone", "GlobalTextMessage", sent, sender),
        Row("phone", "UserTextMessage", {**copy, "user_id": owner}),
        Row("phone", "UserTextMessage", {**copy, "user_id": person(sender).id}),
    ]


TEXT_NOTE = Family(
    name="text_note",
    apps=("phone", "simple_note"),
    difficulty=3,
    phrases=(
        "Save the text message from {sender} as a note titled {title}.",
        "{sender} sent me a text message. Put it into a new note named {title}.",
    ),
    draw=lambda draw: {
        "sender": draw.name(),
        "message": draw.word(),
        "title": draw.word(),
        "other_sender": draw.name(),
        "other_message": draw.word(),
    },
    rows=lambda values: [
        *_text(values, values["sender"], values["message"]),
        *_text(values, values["other_sender"], values["other_message"]),
    ],
    turns=lambda values: [login("phone", "phone_number"), _last_text(values), login("simple_note"), _keep_end(values)],
    slips=lambda values: [
        login_slips("phone", "phone_number"),
        [no_token(_last_text(values)), swap(_last_text(values), 'm["message"]', 'm["text"]', "wrong key")],
        login_slips("simple_note"),
        [no_token(_keep_end(values)), swap(_keep_end(values), "content=", "text=", "wrong argument name")],
    ],
    wrong_ends=lambda values: [
        swap(_keep_end(values), values["message"], values["other_message"], "wrong message"),
        Slip(DONE, "nothing done"),
    ],
    effects=lambda values: [new_note(values)],
    changes='note = only(models.changed_records("simple_note.Note")[0], user_id=main_user.id)',
    checks=(
        equal("One note was added, with the wanted title.", "note.title", 'public_data["title"]'),
        equal("The new note holds the text message.", "note.content", 'public_data["message"]'),
        equal("The new note is not pinned.", "bool(note.pinned)", "False"),
    ),
    splits=CHALLENGE_SPLITS,
)

FAMILIES = (NOTE_ANSWER, NOTE_CREATE, TEXT_NOTE)
