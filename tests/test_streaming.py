"""Streaming: what is shown is the text, as soon as it is certain, and not a character further."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast, StopStringCriteria, TextStreamer

import lab35
from lab35 import GPT, Tokenizer, decode_steps, generate
from lab35.streaming import Event, generate_stream, split_at_stop, stream_decode

TEXTS = [
    "“Holmes—Watson… and the rest?”",
    "I saw 🕵️‍♂️ and 👨‍👩‍👧, from 🇬🇧.",
    "Cafe\u0301, café, naïve, Zoë",
    "赤毛連盟、緋色の研究",
    "Donaudampfschifffahrtsgesellschaft—Kapitänsmützen",
    "😀😀😀😀",
]

ids_of_any_kind = st.lists(st.integers(0, 511), max_size=40)
# Bytes that begin, go on with and end characters of every length, and some that never can.
bytes_of_any_kind = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=5),
        st.sampled_from(
            [b"\xe2\x80", b"\x94", b"\xf0\x9f", b"\x99\x82", b"\xe0", b"\xed\xa0", b"a"]
        ),
    ),
    max_size=12,
)


class Chunks:
    """A tokenizer whose i-th token is the i-th of some byte strings: text cut anywhere."""

    eos_id = -1

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks
        self.ids = range(len(chunks))

    def token_bytes(self, token_id: int) -> bytes:
        """Look a token up."""
        return self.chunks[token_id]


@st.composite
def cut_text(draw: st.DrawFn, alphabet: str | None = None) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut at arbitrary places."""
    characters = st.characters(exclude_categories=["Cs"]) if alphabet is None else alphabet
    text = draw(st.text(characters, max_size=14))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=len(data))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return text, [piece for piece in pieces if piece]


class Steps:
    """Steps of a made-up loop, which notes how many were asked for and whether it was closed."""

    def __init__(self, ids: Sequence[int], reason: str | None = "max_new_tokens") -> None:
        self.taken, self.closed = 0, False
        self._steps = self._run(ids, reason)

    def _run(self, ids: Sequence[int], reason: str | None) -> Iterator[SimpleNamespace]:
        try:
            for position, token_id in enumerate(ids, start=1):
                self.taken = position
                last = reason if position == len(ids) else None
                yield SimpleNamespace(token=torch.tensor([[token_id]]), stop_reason=last)
        finally:
            self.closed = True

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return self._steps

    def close(self) -> None:
        """Close the loop, as one closes a generator."""
        self._steps.close()


def text_of(events: Sequence[Event]) -> str:
    """Join what the events show."""
    return "".join(event.text for event in events)


# --- Characters ----------------------------------------------------------------------------------


@given(ids=ids_of_any_kind)
@example(ids=[261])  # E2 80 and nothing after it
@example(ids=[261, 511, 242])
@example(ids=[])
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Guards the promise for every sequence of ids, of which most are no valid text."""
    pieces = list(stream_decode(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(pieces)


@given(chunks=bytes_of_any_kind)
@example(chunks=[b"\xe0\x80", b"\x80"])
@example(chunks=[b"\xed", b"\xa0\x80"])
@example(chunks=[b"\xf0\x9f", b"\x99", b"a"])
@example(chunks=[b"\xef\xbb\xbf", b"a"])
def test_any_bytes_cut_anywhere(chunks: list[bytes]) -> None:
    """Replacement characters are those of the bytes in one piece, wherever tokens end."""
    cut = Chunks(chunks)
    expected = b"".join(chunks).decode("utf-8", errors="replace")
    assert "".join(stream_decode(cut, cut.ids)) == expected


@given(cut=cut_text())
def test_a_character_appears_with_its_last_byte(cut: tuple[str, list[bytes]]) -> None:
    """Valid text: after each token every whole character is there, and no U+FFFD for a half one."""
    text, chunks = cut
    stream, arrived, shown = Chunks(chunks), 0, ""
    ends = [len(text[:n].encode()) for n in range(len(text) + 1)]
    for chunk, event in zip(chunks, generate_stream(stream, Steps(stream.ids)), strict=False):
        arrived, shown = arrived + len(chunk), shown + event.text
        assert shown == text[: max(n for n, end in enumerate(ends) if end <= arrived)]
    assert shown == text


@given(chunks=bytes_of_any_kind)
@example(chunks=[b"\xf4", b"\x90"])
@example(chunks=[b"\xe0", b"\x80"])
@example(chunks=[b"\xed", b"\xa0", b"\x80"])
def test_only_a_beginning_of_a_character_waits(chunks: list[bytes]) -> None:
    """What waits after each token could become a character, if the right bytes followed.

    Python's decoder knows one exception: a surrogate's first two bytes, ED A0 to ED BF.
    """
    tails = [b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\x90\x80\x80"]
    stream, data, shown = Chunks(chunks), b"", ""
    for chunk, event in zip(chunks, generate_stream(stream, Steps(stream.ids)), strict=False):
        data, shown = data + chunk, shown + event.text
        everything = data.decode("utf-8", errors="replace")
        if data[-2:-1] == b"\xed" and 0xA0 <= data[-1] <= 0xBF:
            assert everything == shown + "\ufffd" * 2
        elif everything != shown:
            assert everything == shown + "\ufffd"
            completed = ((data + tail).decode("utf-8", errors="replace") for tail in tails)
            assert any(len(text) == len(everything) and text[-1] != "\ufffd" for text in completed)


class Watched:
    """Ids that come one by one, and a count of those that have come."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.taken = ids, 0

    def __iter__(self) -> Iterator[int]:
        for token_id in self.ids:
            self.taken += 1
            yield token_id


def test_pieces_come_with_their_ids(tokenizer: Tokenizer) -> None:
    """The iterator is lazy: a piece is there before the next id is asked for."""
    watched = Watched(tokenizer.encode("no—yes"))
    seen = [(piece, watched.taken) for piece in stream_decode(tokenizer, watched)]
    assert seen == [("n", 1), ("o", 2), ("—", 4), ("y", 5), ("es", 6)]


def test_text_without_spaces_is_not_held(tokenizer: Tokenizer) -> None:
    """A long word appears token by token, not at its end."""
    ids = tokenizer.encode("Donaudampfschifffahrtsgesellschaft" * 3)
    pieces = list(stream_decode(tokenizer, ids))
    assert len(pieces) == len(ids)


def test_ids_may_be_a_tensor(tokenizer: Tokenizer) -> None:
    """A row of `Generation.tokens` needs no `tolist`."""
    ids = torch.tensor(tokenizer.encode(TEXTS[0]))
    assert "".join(stream_decode(tokenizer, ids)) == TEXTS[0]


@pytest.mark.parametrize("token_id", [-1, 512])
def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer, token_id: int) -> None:
    """Guards against -1 being taken for the last token; what came before is shown."""
    pieces = stream_decode(tokenizer, [72, token_id])
    assert next(pieces) == "i"
    with pytest.raises(ValueError, match=rf"token_id must lie in \[0, 512\), got {token_id}"):
        next(pieces)


# --- Stop strings --------------------------------------------------------------------------------

stops = st.lists(st.text("ab—\n", min_size=1, max_size=4), max_size=4)


def cut_at_first(text: str, stop: Sequence[str]) -> str:
    """Cut a text at the earliest match, knowing all of it."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


@given(cut=cut_text("ab—\n"), stop=stops)
@example(cut=("abcd", [b"a", b"b", b"c", b"d"]), stop=["abcd", "bc"])
@example(cut=("abce", [b"a", b"b", b"c", b"e"]), stop=["abcd", "bc"])
@example(cut=("abc", [b"a", b"b", b"c"]), stop=["abcd", "bc"])
@example(cut=("aab", [b"a", b"a", b"b"]), stop=["ab"])
def test_the_stream_is_the_text_cut_at_the_first_match(
    cut: tuple[str, list[bytes]], stop: list[str]
) -> None:
    """Whatever the tokens, the same text is shown: all of it before the earliest match."""
    text, chunks = cut
    events = list(generate_stream(Chunks(chunks), Steps(range(len(chunks))), stop=stop))
    assert text_of(events) == cut_at_first(text, stop)
    matched = any(string in text for string in stop)
    assert events[-1].stop_reason == ("stop" if matched else "max_new_tokens")


@given(ids=ids_of_any_kind, data=st.data())
def test_stop_strings_in_arbitrary_ids(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """The promise once more over the real vocabulary, with stop strings out of the text itself."""
    text = tokenizer.decode(i for i in ids if i != tokenizer.eos_id)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    stop = [text[i : i + n] or "?" for i, n in data.draw(st.lists(places, max_size=3))]
    events = list(generate_stream(tokenizer, Steps(ids), stop=stop))
    assert text_of(events) == cut_at_first(text, stop)


@given(cut=cut_text("ab—\n"), stop=stops)
def test_no_token_is_asked_for_once_the_end_is_certain(
    cut: tuple[str, list[bytes]], stop: list[str]
) -> None:
    """The loop ends with the token that settles where to cut, and is closed there."""
    _, chunks = cut
    steps = Steps(range(len(chunks)))
    list(generate_stream(Chunks(chunks), steps, stop=stop))
    settled = [n for n in range(len(chunks) + 1) if is_settled(b"".join(chunks[:n]), stop)]
    assert steps.taken == min(settled, default=len(chunks))
    assert steps.closed


def is_settled(data: bytes, stop: Sequence[str]) -> bool:
    """Say whether there is a match, and no text to come could bring an earlier one."""
    text = data.decode("utf-8", errors="ignore")
    if not any(string in text for string in stop):
        return False
    futures = {text + string[n:] for string in stop for n in range(len(string))}
    return {cut_at_first(future, stop) for future in futures} == {cut_at_first(text, stop)}


@given(text=st.text("ab—\n", max_size=12), stop=stops)
def test_what_waits_could_still_begin_a_match(text: str, stop: list[str]) -> None:
    """Nothing waits in vain: one character more to show could turn out to be one too many."""
    shown, held, match = split_at_stop(text, stop)
    if match is None:
        assert shown + held == text
        assert not held or any(s.startswith(held) and s != held for s in stop)
    else:
        assert held == ""
        assert (shown + match) == text[: len(shown) + len(match)]


def test_the_tail_is_shown_as_soon_as_it_is_harmless() -> None:
    """Each character of a near miss waits, and all of them appear together."""
    cut = Chunks([b"x", b"E", b"N", b"E", b"N", b"D", b"y"])
    events = list(generate_stream(cut, Steps(cut.ids), stop=["END"]))
    assert [event.text for event in events] == ["x", "", "", "EN", "", "", ""]
    assert events[-1] == Event("", None, "stop")


def test_a_match_that_never_completes_is_text(tokenizer: Tokenizer) -> None:
    """The tail is flushed at the end, with the bytes of a character that stays incomplete."""
    ids = [*tokenizer.encode("So it ends.\n"), 261]
    events = list(generate_stream(tokenizer, Steps(ids), stop=["\n\n"]))
    assert events[-1] == Event("\n\ufffd", None, "max_new_tokens")
    assert text_of(events) == tokenizer.decode(ids)


@pytest.mark.parametrize("order", [1, -1])
def test_the_earliest_match_wins_in_any_order(order: int) -> None:
    """The list's order means nothing, not even for matches that begin at the same place."""
    stop = ["Watson", "Holmes", "Hol"][::order]
    assert split_at_stop("So Holmes and Watson", stop) == ("So ", "", "Hol")
    assert split_at_stop("So Hol", stop) == ("So ", "", "Hol")


def test_a_complete_match_waits_for_an_earlier_one() -> None:
    """`bc` is there, but `abcd` would begin before it: only the next character tells."""
    stop = ["abcd", "bc"]
    assert split_at_stop("xabc", stop) == ("x", "abc", None)
    assert split_at_stop("abcd", stop) == ("", "", "abcd")
    assert split_at_stop("abce", stop) == ("a", "", "bc")
    assert split_at_stop("abc", stop, final=True) == ("a", "", "bc")


@pytest.mark.parametrize("at", range(1, 7))
def test_a_stop_string_is_found_across_any_boundary(at: int) -> None:
    """`.—⏎` is five bytes, and a token may end after any of them."""
    data = "a.—\nb".encode()
    cut = Chunks([data[:at], data[at:]])
    events = list(generate_stream(cut, Steps(cut.ids), stop=[".—\n"]))
    assert (text_of(events), events[-1].stop_reason) == ("a", "stop")


@pytest.mark.parametrize("stop", [[""], ["a", ""], "a", "", [b"a"], [1]])
def test_bad_stop_strings_are_refused_at_the_call(tokenizer: Tokenizer, stop: object) -> None:
    """An empty string is everywhere, and a lone one would be taken for its letters."""
    with pytest.raises(ValueError, match="stop must be a sequence of non-empty strings, got"):
        generate_stream(tokenizer, Steps([72]), stop=stop)
    with pytest.raises(ValueError, match="stop must be a sequence of non-empty strings, got"):
        split_at_stop("a", stop)


# --- Events --------------------------------------------------------------------------------------


def test_one_event_a_token_and_one_for_the_end(tokenizer: Tokenizer) -> None:
    """Ids come through unchanged, also those whose text has to wait."""
    ids = tokenizer.encode("no—yes")
    events = list(generate_stream(tokenizer, Steps(ids, "context_limit")))
    assert [event.token_id for event in events] == [*ids, None]
    assert [event.text for event in events] == ["n", "o", "", "—", "y", "es", ""]
    assert [event.stop_reason for event in events] == [None] * 6 + ["context_limit"]


def test_an_event_comes_before_the_next_token_is_asked_for(tokenizer: Tokenizer) -> None:
    """Text on the screen must not wait for the next forward."""
    steps = Steps(tokenizer.encode("Holmes"))
    for position, event in enumerate(generate_stream(tokenizer, steps), start=1):
        assert event.token_id is None or steps.taken == position


def test_end_of_text_is_never_spelled(tokenizer: Tokenizer) -> None:
    """It is no text, at the end or in the middle, where a character may go on after it."""
    dash = tokenizer.encode("—")
    ids = [72, dash[0], tokenizer.eos_id, dash[1], tokenizer.eos_id]
    events = list(generate_stream(tokenizer, Steps(ids, "eos")))
    assert text_of(events) == "i—"
    assert [event.token_id for event in events] == [*ids, None]
    assert events[-1].stop_reason == "eos"


def test_the_loop_s_own_end_token_is_not_shown(tokenizer: Tokenizer) -> None:
    """`decode_steps` may be told that a full stop ends the text: the stream follows it."""
    ids = tokenizer.encode("So. it.")
    assert text_of(list(generate_stream(tokenizer, Steps(ids, "eos")))) == "So. it"


def test_steps_are_closed_when_the_events_are(tokenizer: Tokenizer) -> None:
    """Who stops reading stops the loop, and so does an error."""
    steps = Steps(tokenizer.encode("Holmes"))
    with contextlib.closing(generate_stream(tokenizer, steps)) as events:
        next(events)
    assert (steps.taken, steps.closed) == (1, True)
    steps = Steps([512, 0])
    with pytest.raises(ValueError, match="token_id"):
        list(generate_stream(tokenizer, steps))
    assert steps.closed


def test_steps_are_closed_before_the_last_event(tokenizer: Tokenizer) -> None:
    """Who reads up to the stop reason and no further leaves nothing open."""
    steps = Steps(tokenizer.encode("a\n\nb"))
    for event in generate_stream(tokenizer, steps, stop=["\n\n"]):
        if event.stop_reason is not None:
            assert (steps.taken, steps.closed) == (3, True)
            break


def test_steps_may_be_few_or_a_list(tokenizer: Tokenizer) -> None:
    """No step at all, steps without a reason, and steps that cannot be closed."""
    assert list(generate_stream(tokenizer, [])) == [Event("", None, "max_new_tokens")]
    few = list(Steps([72, 261], reason=None))
    assert list(generate_stream(tokenizer, few)) == [
        Event("i", 72, None),
        Event("", 261, None),
        Event("\ufffd", None, "max_new_tokens"),
    ]


def test_more_than_one_row_is_refused(tokenizer: Tokenizer, tiny_model: GPT) -> None:
    """Three rows are three texts, and one stream cannot show them."""
    steps = decode_steps(tiny_model, torch.zeros(3, 2, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=r"steps must be those of one row.*\(3, 1\)"):
        list(generate_stream(tokenizer, steps))


# --- With the model ------------------------------------------------------------------------------


def test_the_stream_shows_what_generate_writes(
    model: GPT, tokenizer: Tokenizer, prompt: torch.Tensor
) -> None:
    """Greedy, to the end of the positions: the same ids, the same text, the same reason."""
    made = generate(model, prompt, 500, temperature=0)
    events = list(generate_stream(tokenizer, decode_steps(model, prompt, 500, temperature=0)))
    assert [event.token_id for event in events[:-1]] == made.new_tokens[0].tolist()
    assert text_of(events) == tokenizer.decode(made.new_tokens[0])
    assert events[-1].stop_reason == made.stop_reason == "context_limit"


def test_end_of_text_ends_the_stream(
    model: GPT, tokenizer: Tokenizer, prompt: torch.Tensor
) -> None:
    """A loop with an end token passes its reason on; here the second greedy token is it."""
    first, second = generate(model, prompt, 2, temperature=0).new_tokens[0].tolist()
    steps = decode_steps(model, prompt, 9, temperature=0, eos_id=second)
    assert list(generate_stream(tokenizer, steps)) == [
        Event(tokenizer.decode([first]), first, None),
        Event("", second, None),
        Event("", None, "eos"),
    ]


def test_a_stop_string_saves_the_forwards_after_it(
    model: GPT, tokenizer: Tokenizer, prompt: torch.Tensor
) -> None:
    """A hook counts the model's calls: as many as tokens were looked at, and not one more."""
    text = tokenizer.decode(generate(model, prompt, 40, temperature=0).new_tokens[0])
    calls = []
    hook = model.register_forward_pre_hook(lambda module, args: calls.append(args))
    steps = decode_steps(model, prompt, 40, temperature=0)
    events = list(generate_stream(tokenizer, steps, stop=[text[20:24]]))
    hook.remove()
    assert text_of(events) == text[: text.index(text[20:24])]
    assert events[-1].stop_reason == "stop"
    assert len(calls) == len(events) - 1 < 40


# --- Peers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """The same tokenizer as the library loads it, without lab35 around it."""
    path = Path(lab35.__file__).parent / "assets" / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def hugging_face(backend: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer once more, as `transformers` wants it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, eos_token="<|endoftext|>"
    )


# A literal U+FFFD is where DecodeStream is not defined: it takes it for an incomplete character.
plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))


@given(text=plain_text)
@example(text=TEXTS[0])
@example(text=TEXTS[1])
def test_decode_stream_of_tokenizers_shows_the_same(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, text: str
) -> None:
    """Valid text: theirs is never ahead of ours, and both end with the same text."""
    ids, stream = tokenizer.encode(text), DecodeStream(skip_special_tokens=False)
    theirs = ours = ""
    for token_id, event in zip(ids, generate_stream(tokenizer, Steps(ids)), strict=False):
        theirs += stream.step(backend, token_id) or ""
        ours += event.text
        assert ours.startswith(theirs)
    assert ours == theirs == text


class Collected(TextStreamer):
    """Hugging Face's streamer with a list in place of the screen."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Keep what would be printed."""
        self.shown = getattr(self, "shown", "") + text


@pytest.mark.parametrize("text", TEXTS)
def test_text_streamer_shows_the_same_and_never_sooner(
    tokenizer: Tokenizer, hugging_face: PreTrainedTokenizerFast, text: str
) -> None:
    """Hugging Face's streamer waits for spaces where ours does not, and ends with the same text."""
    ids, streamer, ours = tokenizer.encode(text), Collected(hugging_face), ""
    for token_id, event in zip(ids, generate_stream(tokenizer, Steps(ids)), strict=False):
        streamer.put(torch.tensor([token_id]))
        ours += event.text
        assert ours.startswith(streamer.shown)
    streamer.end()
    assert ours == streamer.shown == text


def test_text_streamer_holds_symbols_without_spaces_to_the_end(
    tokenizer: Tokenizer, hugging_face: PreTrainedTokenizerFast
) -> None:
    """What the chapter says of it: nothing of four emoji appears before the end."""
    streamer = Collected(hugging_face)
    for token_id in tokenizer.encode("😀😀😀😀"):
        streamer.put(torch.tensor([token_id]))
    assert streamer.shown == ""
    streamer.end()
    assert streamer.shown == "😀😀😀😀"


@pytest.mark.parametrize("stop", ["—", "son and", "\n\n", "t?”", "zzz"])
def test_hugging_face_stops_at_the_same_token(
    tokenizer: Tokenizer, hugging_face: PreTrainedTokenizerFast, stop: str
) -> None:
    """Its criterion for stop strings fires with the token that ends our stream."""
    ids = tokenizer.encode("“Holmes—Watson and the rest?”\n\nHe rose.")
    criterion = StopStringCriteria(hugging_face, [stop])
    fired = [
        n
        for n in range(1, len(ids) + 1)
        if criterion(torch.tensor([ids[:n]]), torch.zeros(1, 1))[0]
    ]
    steps = Steps(ids)
    list(generate_stream(tokenizer, steps, stop=[stop]))
    assert steps.taken == min(fired, default=len(ids))
