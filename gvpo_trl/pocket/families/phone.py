"""Families of tasks on phone, whose accounts have a phone number for a user name and not an e-mail address."""

from .base import (
    DONE,
    Effect,
    Family,
    Row,
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


def _alarm_end(values: dict) -> str:
    return (
        f'apis.phone.create_alarm(time="{values["time"]}", label="{values["label"]}", '
        f"snooze_minutes={values['snooze']}, access_token=token)\n{DONE}"
    )


ALARM_SET = Family(
    name="alarm_set",
    apps=("phone",),
    difficulty=1,
    phrases=(
        "With create_alarm of phone, set an alarm at {time} with the label {label} and a snooze of {snooze} minutes.",
        "Use create_alarm of phone: an alarm named {label} at {time}, snooze {snooze} minutes.",
    ),
    draw=lambda draw: {"time": draw.time(), "label": draw.word(), "snooze": draw.number()},
    rows=lambda values: [],
    turns=lambda values: [docs("phone", "create_alarm"), login("phone", "phone_number"), _alarm_end(values)],
    slips=lambda values: [
        docs_slips("phone", "create_alarm"),
        login_slips("phone", "phone_number"),
        [
            swap(_alarm_end(values), "time=", "at=", "wrong argument name"),
            swap(_alarm_end(values), "snooze_minutes=", "minutes snooze=", "syntax error"),
            no_token(_alarm_end(values)),
            misspelt_token(_alarm_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_alarm_end(values), "snooze_minutes=", "snooze=", "an argument that is ignored"),
        swap(_alarm_end(values), "label=", "name=", "an argument that is ignored"),
        swap(_alarm_end(values), f", snooze_minutes={values['snooze']}", "", "no snooze"),
        swap(_alarm_end(values), f', label="{values["label"]}"', "", "no label"),
        Slip(DONE, "nothing done"),
    ],
    effects=lambda values: [
        added("phone.Alarm", user_id=person(values["supervisor"]).id, enabled=True, repeat_days=None, vibration=True)
    ],
    changes='alarm = only(models.changed_records("phone.Alarm")[0], user_id=main_user.id)',
    checks=(
        equal("One alarm was added, at the wanted time.", "alarm.time", 'public_data["time"]'),
        equal("The alarm has the wanted label.", "alarm.label", 'public_data["label"]'),
        equal("The alarm has the wanted snooze.", "alarm.snooze_minutes", 'public_data["snooze"]'),
    ),
    documented=("phone", "create_alarm"),
)


def contact(values: dict, name: str) -> Row:
    """Make an entry of the supervisor's contact book."""
    other = person(name)
    return Row(
        "phone",
        "Contact",
        {
            "user_id": person(values["supervisor"]).id,
            "first_name": other.first_name,
            "last_name": other.last_name,
            "email": other.email,
            "phone_number": other.phone_number,
            "relationships": ["friend"],
        },
    )


def _find_contact(values: dict) -> str:
    return (
        f'c = apis.phone.search_contacts(query="{values["receiver"]}", access_token=token)[0]\n'
        'print(c["first_name"], c["phone_number"])'
    )


def _text_end(values: dict) -> str:
    return (
        f'apis.phone.send_text_message(phone_number=c["phone_number"], message="{values["message"]}", '
        f"access_token=token)\n{DONE}"
    )


def _new_text(values: dict) -> list[Effect]:
    sender, receiver = person(values["supervisor"]).id, person(values["receiver"]).id
    copies = [added("phone.UserTextMessage", user_id=user) for user in (sender, receiver)]
    return [added("phone.GlobalTextMessage", sender_id=sender, receiver_id=receiver), *copies]


TEXT_PERSON = Family(
    name="text_person",
    apps=("phone",),
    difficulty=2,
    phrases=(
        "Send {receiver} a text message that says {message}.",
        "Text {message} to {receiver}.",
        "{receiver} should get the text message {message} from me.",
    ),
    draw=lambda draw: {
        "receiver": draw.name(),
        "message": draw.word(),
        "others": [draw.name(), draw.name()],
    },
    rows=lambda values: [contact(values, name) for name in sorted([values["receiver"], *values["others"]])],
    turns=lambda values: [login("phone", "phone_number"), _find_contact(values), _text_end(values)],
    slips=lambda values: [
        login_slips("phone", "phone_number"),
        [
            no_token(_find_contact(values)),
            swap(_find_contact(values), "search_contacts", "find_contact", "an API that is not there"),
            swap(_find_contact(values), 'c["first_name"]', 'c["name"]', "wrong key"),
        ],
        [
            swap(_text_end(values), 'c["phone_number"]', f'"{values["receiver"]}"', "a name where a number belongs"),
            swap(_text_end(values), "message=", "text=", "wrong argument name"),
            no_token(_text_end(values)),
            misspelt_token(_text_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_text_end(values), f'message="{values["message"]}"', f'message="{values["receiver"]}"', "wrong message"),
        swap(
            _text_end(values), 'c["phone_number"]', f'"{person(values["others"][0]).phone_number}"', "wrong receiver"
        ),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"receiver_id": person(values["receiver"]).id},
    effects=_new_text,
    changes='message = only(models.changed_records("phone.GlobalTextMessage")[0], sender_id=main_user.id)',
    checks=(
        equal("One text message went to the right person.", "message.receiver_id", 'private_data["receiver_id"]'),
        equal("The text message says what was asked.", "message.message", 'public_data["message"]'),
    ),
)

FAMILIES = (ALARM_SET, TEXT_PERSON)
