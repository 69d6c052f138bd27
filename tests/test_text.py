"""Characters that a terminal obeys are shown instead, in the viewer, in errors and in the log."""

import logging
import traceback
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import print_prompt_completions_sample

from gvpo_trl.cli import main as cli
from gvpo_trl.faults import EnvironmentFault, EpisodeFault, SetupError
from gvpo_trl.text import printable, printable_line, printable_values
from tests.support.operations import count
from tests.support.rolling import DONE, roll
from tests.support.toy import ToyEnvironment

ESCAPES = {
    "clipboard (OSC 52)": ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),
    "clear screen": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "window title": ("\x1b]0;title\x1b\\", "\\x1b]0;title\\x1b\\"),
    "hyperlink (OSC 8)": ("\x1b]8;;http://x\x1b\\y", "\\x1b]8;;http://x\\x1b\\y"),
    "C1 control sequence": ("\x9b2J", r"\x9b2J"),
    "C1 operating system command": ("\x9d52;c;eA==\x9c", r"\x9d52;c;eA==\x9c"),
    "carriage return": ("FAILED\rpassed", r"FAILED\rpassed"),
    "backspace": ("no\b\byes", r"no\x08\x08yes"),
    "form feed, vertical tab": ("a\fb\vc", r"a\x0cb\x0bc"),
    "null, delete": ("a\0b\x7f", r"a\x00b\x7f"),
    "bidirectional override": ("\u202egpj.exe\u202c", r"\u202egpj.exe\u202c"),
    "bidirectional isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "direction mark": ("a\u200fb\u061c", r"a\u200fb\u061c"),
    "zero width": ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
    "line and paragraph separator": ("a\u2028b\u2029", r"a\u2028b\u2029"),
    "next line (C1)": ("a\x85b", r"a\x85b"),
    "tag characters": ("a\U000e0041", r"a\U000e0041"),
    "lone surrogate": ("a\ud83d", r"a\ud83d"),
    "private use": ("\ue000", r"\ue000"),
}
"""What it is -> a text and the way it is shown."""


def is_shown(text, kept="\n\t"):
    return all(character.isprintable() or character in kept for character in text)


@pytest.mark.parametrize(("text", "shown"), ESCAPES.values(), ids=ESCAPES)
def test_every_kind_of_escape_is_spelled_out(text, shown):
    assert printable(text) == printable_line(text) == shown


def test_ordinary_text_stays_as_it_is():
    text = "def f():\n\tprint('ä 日本語 🎵 עברית', \"\\n\")\n"
    assert printable(text) == text
    assert printable_line(text) == text.replace("\n", "\\n").replace("\t", "\\t")


@given(st.text(st.characters(codec=None, categories=None)))
def test_nothing_but_printable_characters_comes_out(text):
    assert is_shown(printable(text)) and is_shown(printable_line(text), kept="")
    assert printable(printable(text)) == printable(text)


def test_every_character_of_unicode():
    everything = "".join(map(chr, range(0x110000)))
    assert is_shown(printable(everything))
    escaped = {unicodedata.category(each) for each in everything if printable(each) != each}
    assert escaped == {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
    assert printable(" ") == " "


def test_messages_are_escaped_where_they_hold_text():
    content = [{"type": "text", "text": "\x1b[2J"}, {"type": "image", "image": 3}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a\r\nb"}]
    assert printable_values(messages) == [
        {"role": "user", "content": [{"type": "text", "text": r"\x1b[2J"}, {"type": "image", "image": 3}]},
        {"role": "assistant", "content": "a\\r\nb"},
    ]


@pytest.mark.parametrize(("text", "shown"), ESCAPES.values(), ids=ESCAPES)
def test_trls_table_of_completions_shows_escaped_messages(text, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    messages = printable_values([[{"role": "user", "content": text}]])
    print_prompt_completions_sample(messages, messages, {"reward": [1.0]}, [0.0], step=1)
    out = capsys.readouterr().out
    assert is_shown(out) and out.count(shown) == 2


@pytest.mark.parametrize("unit", ["\x1b", "\u202e", "\ud83d", "é", " ", "\r\n", "\\", "\x1b[2J "])
def test_twice_the_text_takes_at_most_twice_the_operations(unit):
    once, twice = (count(printable, unit * length) for length in (2000, 4000))
    assert twice <= 2 * once + 10


@pytest.mark.parametrize("fault", [EnvironmentFault, SetupError])
@pytest.mark.parametrize("arguments", [["view", "run"], ["--debug", "view", "run"]])
def test_an_error_of_a_command_that_quotes_an_agent(fault, arguments, monkeypatch, capsys):
    def view(*arguments, **filters):
        raise fault("task 1: " + "".join(text for text, _ in ESCAPES.values()) + "\nits cause: \x1b[31mred")

    monkeypatch.setattr("gvpo_trl.reporting.viewer.view", view)
    assert cli.main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert is_shown(error)
    assert r"\x1b]52;c;" in error and r"its cause: \x1b[31mred" in error


def test_a_fault_in_a_traceback_and_in_the_log_of_a_rollout(caplog):
    text = "".join(text for text, _ in ESCAPES.values())

    def lose(number, place):
        raise EpisodeFault(f"gone:\n{text}")

    assert is_shown("".join(traceback.format_exception_only(EpisodeFault(text))))
    with caplog.at_level(logging.WARNING):
        (trajectory,) = roll([[DONE]], ToyEnvironment(faults=lose))
    assert len(caplog.messages) == 2 and all(map(is_shown, caplog.messages))
    assert trajectory.fault == f"episode: gone:\n{printable(text)}"
