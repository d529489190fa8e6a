"""What a program begins with, found without sending anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sapwood.lang.api import assistant, ids, special, system, user
from sapwood.lang.backend import Ids, Text, Turn
from sapwood.lang.backends.echo import Echo
from sapwood.lang.outputs import gen, select
from sapwood.lang.program import function
from sapwood.lang.state import AsyncState, State
from sapwood.lang.trace import Stop, Unknown, prefix_of, refuse, stable_prefix
from tests.tokenizer_kinds import TEXTS, byte_level, metaspace

OPEN = Turn("assistant", (), open=True)


def test_text_before_the_first_output_is_the_prefix() -> None:
    def program(s: State) -> None:
        s += "Once upon"
        s += " a time"
        s += gen("a") + " and later "
        s += gen("b")

    assert prefix_of(program, [{}]) == (Text("Once upon a time"),)


def test_a_selection_ends_it_too() -> None:
    def program(s: State) -> None:
        s += "It is " + select("a", choices=["x", "y"]) + "."

    assert prefix_of(program, [{}]) == (Text("It is "),)


def test_messages_are_a_prefix_up_to_the_one_that_is_open() -> None:
    def program(s: State) -> None:
        s += system("Be brief.")
        with s.user():
            s += "2+2="
        s += assistant(gen("a"))

    found = prefix_of(program, [{}])
    assert found == (Turn("system", (Text("Be brief."),)), Turn("user", (Text("2+2="),)), OPEN)


def test_special_text_and_token_ids_keep_their_places() -> None:
    def program(s: State) -> None:
        s += "a"
        s += special("<|im_end|>") + "b"
        s += ids([1, 2]) + gen("x")

    expected = (Text("a"), Text("<|im_end|>", special=True), Text("b"), Ids((1, 2), ""))
    assert prefix_of(program, [{}]) == expected


def test_a_program_without_outputs_is_its_own_prefix() -> None:
    def program(s: State) -> None:
        s += "All of it"

    assert prefix_of(program, [{}]) == (Text("All of it"),)


def question(s: State, shots: str, question: str) -> None:
    s += shots + "Question: " + question + "\nAnswer:"
    s += gen("answer")


def test_arguments_that_are_not_known_end_it_where_tokens_are_certain() -> None:
    assert prefix_of(question, [{"shots": "1+1=2\n"}]) == (Text("1+1=2\nQuestion:"),)
    assert prefix_of(question, [{}]) == ()
    assert prefix_of(question, []) == ()


def test_an_argument_that_is_not_known_may_have_a_default() -> None:
    def program(s: State, question: str, style: str = "brief") -> None:
        s += f"Be {style} now. " + question + gen("a")

    assert prefix_of(program, [{}]) == (Text("Be brief now."),)
    assert prefix_of(program, [{"style": "long"}]) == (Text("Be long now."),)
    assert prefix_of(program, []) == ()


def test_all_sets_of_arguments_share_the_prefix() -> None:
    sets = [{"shots": "1+1=2\n", "question": text} for text in ("What is 5?", "What is 6?", "What was 7?")]
    assert prefix_of(question, sets) == (Text("1+1=2\nQuestion: What"),)
    assert prefix_of(question, sets[:2]) == (Text("1+1=2\nQuestion: What is"),)
    assert prefix_of(question, sets[:1] * 3) == (Text("1+1=2\nQuestion: What is 5?\nAnswer:"),)
    assert prefix_of(question, [*sets, {"shots": "x", "question": "y"}]) == ()


def chat(s: State, shots: str, question: str) -> None:
    s += system("Be brief.")
    s += user(shots + question)
    s += assistant(gen("answer"))


BRIEF = Turn("system", (Text("Be brief."),))


def test_messages_that_begin_alike_are_shared_as_an_open_one() -> None:
    sets = [{"shots": "A: 1\nB: 2\n", "question": text} for text in ("and C?", "or D?")]
    shared = (BRIEF, Turn("user", (Text("A: 1\nB:"),), open=True))
    assert prefix_of(chat, sets) == shared
    assert prefix_of(chat, [{"shots": "A: 1\nB: 2\n"}]) == shared
    assert prefix_of(chat, [{"shots": "", "question": text} for text in ("and C?", "or D?")]) == (BRIEF,)


def test_messages_of_different_roles_share_nothing() -> None:
    def program(s: State, role: str) -> None:
        s += system("Be brief.")
        s += (user if role == "user" else assistant)("Well, it is so")
        s += gen("a")

    assert prefix_of(program, [{"role": "user"}, {"role": "assistant"}]) == (BRIEF,)


def test_a_run_that_asks_earlier_ends_the_prefix_for_all() -> None:
    def program(s: State, early: bool) -> None:
        s += "Once upon"
        if early:
            s += gen("a")
        s += " a time there was"
        s += gen("b")

    assert prefix_of(program, [{"early": True}, {"early": False}]) == (Text("Once"),)
    assert prefix_of(program, [{"early": True}]) == (Text("Once upon"),)


def test_nothing_is_read_from_a_state_that_is_traced() -> None:
    reads: list[Callable[[State], Any]] = [
        lambda s: s["x"],
        lambda s: s.get_var("x"),
        lambda s: s.get_meta_info("x"),
        lambda s: "x" in s,
        lambda s: s.text(),
        lambda s: s.messages(),
        lambda s: s.ids(),
        lambda s: s.sync(),
        lambda s: s.error(),
        lambda s: s.report(),
        lambda s: s.cancel(),
        lambda s: repr(s),
        lambda s: next(s.text_iter()),
    ]
    for number, read in enumerate(reads):
        beyond: list[int] = []

        def program(s: State, read: Any = read, beyond: Any = beyond) -> None:
            s += "One two "
            s["x"] = "y"
            with s.var_scope("scope"):
                s += "three four"
            read(s)
            beyond.append(1)

        assert prefix_of(program, [{}]) == (Text("One two three"),), number
        assert beyond == [], number


def test_branches_end_it_and_seal_what_is_before_them() -> None:
    def program(s: State) -> None:
        s += "Two tips"
        branches = s.fork(2)
        branches += gen("tip")

    assert prefix_of(program, [{}]) == (Text("Two tips"),)

    def copied(s: State) -> None:
        s += "Two tips"
        with s.copy() as other:
            other += "!"

    assert prefix_of(copied, [{}]) == (Text("Two tips"),)


def test_looking_at_an_unknown_argument_ends_it() -> None:
    looks: list[Callable[[Any], Any]] = [
        lambda x: f"{x}",
        lambda x: f"{x!r}",
        str,
        bool,
        len,
        list,
        int,
        float,
        lambda x: x[0],
        lambda x: x.strip(),
        lambda x: x == "a",
        lambda x: x != "a",
        lambda x: x < 1,
        lambda x: x * 2,
        lambda x: {x: 1},
        lambda x: "a" in x,
        lambda x: x(),
        lambda x: [1, 2][x],
    ]
    for number, look in enumerate(looks):
        with pytest.raises(Stop):
            look(Unknown("x"))

        def program(s: State, x: Any, look: Any = look) -> None:
            s += "One two"
            look(x)
            s += " three four"

        assert prefix_of(program, [{}]) == (Text("One"),), number


def test_a_program_s_own_handlers_do_not_go_on() -> None:
    beyond: list[str] = []

    def program(s: State) -> None:
        s += "Once upon"
        try:
            with s.user():
                s += "x y"
                s += gen("a")
        except Exception:
            beyond.append("handler")
        finally:
            try:
                s += " more"
            except BaseException:
                beyond.append("stopped")

    found = prefix_of(program, [{}])
    assert found == (Text("Once upon"), Turn("user", (Text("x y"),), open=True))
    assert beyond == ["stopped"]


def test_an_error_of_the_program_ends_it() -> None:
    def program(s: State) -> None:
        s += "Once upon a time"
        raise ValueError("its own")

    assert prefix_of(program, [{}]) == (Text("Once upon a"),)

    def wrong(s: State) -> None:
        s += "Once upon a time"
        s += 3  # type: ignore[arg-type]

    assert prefix_of(wrong, [{}]) == (Text("Once upon a"),)


def test_an_async_program_is_traced_without_a_loop() -> None:
    async def program(s: AsyncState, question: str) -> None:
        s += "Once upon"
        async with s.user():
            s += "a b " + question
        s += assistant(gen("a"))
        await s["a"]

    assert prefix_of(program, [{"question": "c"}]) == (
        Text("Once upon"),
        Turn("user", (Text("a b c"),)),
        OPEN,
    )

    class Later:
        def __await__(self) -> Iterator[None]:
            yield

    async def waits(s: AsyncState) -> None:
        s += "Once upon"
        async with s.user():
            s += "a b"
            try:
                await Later()
            finally:
                s += " c"

    assert prefix_of(waits, [{}]) == (Text("Once upon"), Turn("user", (Text("a"),), open=True))


def test_what_would_send_something_can_refuse() -> None:
    beyond: list[int] = []

    def program(s: State) -> None:
        s += "Once upon"
        refuse()
        beyond.append(1)

    assert prefix_of(program, [{}]) == (Text("Once"),)
    assert beyond == []
    refuse()


def test_a_program_that_is_run_within_another_one_sends_nothing() -> None:
    echo = Echo(["never"])

    @function
    def inner(s: State) -> None:
        s += "three four" + gen("a")

    @function
    def shared(s: State) -> None:
        s += " three four"

    def runs(s: State) -> None:
        s += "One two"
        inner.run(backend=echo)

    def many(s: State) -> None:
        s += "One two"
        inner.run_batch([{}, {}], backend=echo)

    def goes_on(s: State) -> None:
        s += "One two"
        shared(s)
        inner(s)

    assert prefix_of(runs, [{}]) == prefix_of(many, [{}]) == (Text("One"),)
    assert prefix_of(goes_on, [{}]) == (Text("One two three fourthree four"),)
    assert echo.calls == []


STABLE = [
    ("One two", "One"),
    ("One two ", "One two"),
    ("One  two", "One"),
    ("One \n two", "One"),
    ("One", ""),
    ("", ""),
    (" One", ""),
    ("One\ntwo", "One\n"),
    ("One\n\ntwo", ""),
    ("One.\ntwo", "One.\n"),
    ("木\n木", "木\n"),
    ("a b\nc", "a b\n"),
    ("One two\n", "One"),
    ("One\ttwo", ""),
]


@pytest.mark.parametrize(("text", "prefix"), STABLE)
def test_text_is_cut_at_borders_of_words(text: str, prefix: str) -> None:
    assert stable_prefix(text) == prefix


def split_as_llama_3() -> Tokenizer:
    """Bytes in words as many models since have them: punctuation takes the new lines after it."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *(random_text(random.Random(i)) for i in range(50))], trainer)
    return tokenizer


def random_text(rng: random.Random) -> str:
    parts = ["a", "the", "dog", "5", "12", " ", " ", " ", "\n", "\n", ".", ",", "é", "木", "'s", "?", "\t"]
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 12)))


@pytest.mark.parametrize("kind", [byte_level, metaspace, split_as_llama_3])
def test_the_tokens_of_what_is_left_begin_those_of_the_whole(kind: Callable[[], Tokenizer]) -> None:
    tokenizer, rng, cut = kind(), random.Random(7), 0
    for _ in range(3000):
        text = random_text(rng)
        prefix = stable_prefix(text)
        head, whole = tokenizer.encode(prefix).ids, tokenizer.encode(text + random_text(rng)).ids
        assert whole[: len(head)] == head, (prefix, text)
        cut += bool(prefix)
    assert cut > 500
