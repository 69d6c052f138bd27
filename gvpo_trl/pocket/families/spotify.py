"""Families of tasks on spotify, where every word of the vocabulary is the title of one song."""

from .base import (
    DONE,
    Family,
    Row,
    Slip,
    added,
    among,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
    updated,
)
from .vocabulary import WORDS, artist_of, genre_of, person


def _describe(title: str) -> str:
    return f'song = apis.spotify.search_songs(query="{title}")[0]\nprint(song["artists"][0]["name"], song["genre"])'


def _song_end(values: dict) -> str:
    return f'apis.supervisor.complete_task(answer="{artist_of(values["song"])} {genre_of(values["song"])}")'


SONG_ANSWER = Family(
    name="song_answer",
    apps=("spotify",),
    difficulty=1,
    phrases=(
        "Who sings the song {song} on Spotify, and which genre is it? Answer with the artist and the genre.",
        "Tell me the artist and the genre of the Spotify song {song}.",
    ),
    draw=lambda draw: {"song": draw.word(), "other_song": draw.word()},
    rows=lambda values: [],
    turns=lambda values: [_describe(values["song"]), _song_end(values)],
    slips=lambda values: [
        [
            swap(_describe(values["song"]), 'song["artists"][0]', 'song["artist"]', "wrong key"),
            swap(_describe(values["song"]), "search_songs", "find_song", "an API that is not there"),
        ],
        [
            swap(_song_end(values), "complete_task", "complete", "an API that is not there"),
            swap(_song_end(values), '")', '"', "no closing bracket"),
            Slip("apis.supervisor.complete_task(answer=artist)", "undefined name"),
        ],
    ],
    wrong_ends=lambda values: [
        Slip(f'apis.supervisor.complete_task(answer="{values["song"]} {genre_of(values["song"])}")', "wrong artist"),
        Slip(f'apis.supervisor.complete_task(answer="{values["song"]}")', "the title for an answer"),
        swap(_song_end(values), "answer=", "result=", "an argument that is ignored"),
        Slip(DONE, "no answer"),
    ],
    answer=lambda values: f"{artist_of(values['song'])} {genre_of(values['song'])}",
    facts=lambda values: {"artist": artist_of(values["song"]), "genre": genre_of(values["song"])},
    effects=lambda values: [],
    changes="words = answer_words(models)",
    checks=(
        equal(
            "The answer gives two things, the artist first.",
            "[len(words), *words[:1]]",
            '[2, private_data["artist"].lower()]',
        ),
        equal(
            "The answer gives two things, the genre last.",
            "[len(words), *words[-1:]]",
            '[2, private_data["genre"]]',
        ),
    ),
)


def _find_song(title: str, name: str = "song") -> str:
    return f'{name} = apis.spotify.search_songs(query="{title}")[0]'


def _look(values: dict) -> str:
    return f'{_find_song(values["song"])}\nprint(song["song_id"], song["title"])'


def _keep_end(values: dict) -> str:
    return (
        'apis.spotify.like_song(song_id=song["song_id"], access_token=token)\n'
        f'apis.spotify.add_song_to_library(song_id=song["song_id"], access_token=token)\n{DONE}'
    )


SONG_KEEP = Family(
    name="song_keep",
    apps=("spotify",),
    difficulty=1,
    phrases=(
        "Like the song {song} on Spotify and add it to my library.",
        "On Spotify, put the song {song} into my song library and like it.",
    ),
    draw=lambda draw: {"song": draw.word()},
    rows=lambda values: [],
    turns=lambda values: [login("spotify"), _look(values), _keep_end(values)],
    slips=lambda values: [
        login_slips("spotify"),
        [
            swap(_look(values), "search_songs", "find_song", "an API that is not there"),
            swap(_look(values), 'song["song_id"]', 'song["id"]', "wrong key"),
        ],
        [
            no_token(_keep_end(values)),
            misspelt_token(_keep_end(values)),
            swap(_keep_end(values), 'song["song_id"]', f'"{values["song"]}"', "a title where an id belongs"),
            swap(_keep_end(values), "song_id=", "song=", "wrong argument name"),
        ],
    ],
    wrong_ends=lambda values: [
        Slip("\n".join(_keep_end(values).splitlines()[::2]), "only liked"),
        Slip("\n".join(_keep_end(values).splitlines()[1:]), "only added"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"song_id": song_id(values["song"])},
    effects=lambda values: [
        added("spotify.SongLike", user_id=person(values["supervisor"]).id),
        updated("spotify.Song", song_id(values["song"]), "like_count"),
        added("spotify.UserLibrarySong", user_id=person(values["supervisor"]).id),
    ],
    changes=(
        'liked = [r.song_id for r in models.changed_records("spotify.SongLike")[0] if r.user_id == main_user.id]\n'
        'kept = [r.song_id for r in models.changed_records("spotify.UserLibrarySong")[0] if r.user_id == main_user.id]'
    ),
    checks=(
        equal("The wanted song, and no other, was liked.", "liked", '[private_data["song_id"]]'),
        equal("The wanted song, and no other, was added to the library.", "kept", '[private_data["song_id"]]'),
    ),
)


def song_id(title: str) -> int:
    """Return the id of the song with this title."""
    return WORDS.index(title) + 1


def _find_both(values: dict) -> str:
    return f'{_find_song(values["first"], "a")}\n{_find_song(values["second"], "b")}\nprint(a["title"], b["title"])'


def _playlist_end(values: dict) -> str:
    add = 'apis.spotify.add_song_to_playlist(playlist_id=p["playlist_id"], song_id={}["song_id"], access_token=token)'
    return (
        f'p = apis.spotify.create_playlist(title="{values["title"]}", access_token=token)\n'
        f"{add.format('a')}\n{add.format('b')}\n{DONE}"
    )


def _without_line(code: str, line: int, label: str) -> Slip:
    lines = code.splitlines()
    return Slip("\n".join([*lines[:line], *lines[line + 1 :]]), label)


PLAYLIST_MAKE = Family(
    name="playlist_make",
    apps=("spotify",),
    difficulty=3,
    phrases=(
        "Make a Spotify playlist {title} with the songs {first} and {second}.",
        "I want a new Spotify playlist named {title}. It has two songs: {first} and {second}.",
    ),
    draw=lambda draw: {"title": draw.word(), "first": draw.word(), "second": draw.word(), "old": draw.word()},
    rows=lambda values: [
        Row("spotify", "Playlist", {"user_id": person(values["supervisor"]).id, "title": values["old"]})
    ],
    turns=lambda values: [login("spotify"), _find_both(values), _playlist_end(values)],
    slips=lambda values: [
        login_slips("spotify"),
        [
            swap(_find_both(values), "search_songs", "find_song", "an API that is not there"),
            swap(_find_both(values), 'a["title"]', 'a["name"]', "wrong key"),
        ],
        [
            swap(_playlist_end(values), "title=", "name=", "wrong argument name"),
            swap(_playlist_end(values), "create_playlist", "make_playlist", "an API that is not there"),
            no_token(_playlist_end(values)),
            misspelt_token(_playlist_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        _without_line(_playlist_end(values), 2, "only the first song"),
        _without_line(_playlist_end(values), 1, "only the second song"),
        Slip("\n".join(_playlist_end(values).splitlines()[::3]), "an empty playlist"),
        swap(_playlist_end(values), f'"{values["title"]}"', f'"{values["first"]}"', "wrong title"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"first_id": song_id(values["first"]), "second_id": song_id(values["second"])},
    effects=lambda values: [
        added("spotify.Playlist", user_id=person(values["supervisor"]).id, is_public=False),
        *[added("spotify.PlaylistSong")] * 2,
    ],
    changes=(
        'playlist = only(models.changed_records("spotify.Playlist")[0], user_id=main_user.id)\n'
        'added = models.changed_records("spotify.PlaylistSong")[0]\n'
        "songs = [r.song_id for r in added if playlist is not None and r.playlist_id == playlist.id]"
    ),
    checks=(
        equal("One playlist was made, with the wanted title.", "playlist.title", 'public_data["title"]'),
        among("The new playlist has the first song.", 'private_data["first_id"]', "songs"),
        among("The new playlist has the second song.", 'private_data["second_id"]', "songs"),
        equal(
            "The new playlist has no other song.",
            "sorted(songs)",
            'sorted([private_data["first_id"], private_data["second_id"]])',
        ),
    ),
)

FAMILIES = (SONG_ANSWER, SONG_KEEP, PLAYLIST_MAKE)
