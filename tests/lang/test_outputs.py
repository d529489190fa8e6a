"""What a program may ask a model for, and what it may not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang.backend import Answer, Generate, Logprobs, Sampling, Score
from sapwood.lang.backends.echo import Echo
from sapwood.lang.ir import Concat, Constant, Generation, Selection


def test_select_with_no_choice_raises_at_once() -> None:
    wrong: list[Any] = [[], None, "abc"]
    for choices in wrong:
        with pytest.raises(ValueError, match="choices must be a list of at least one text"):
            sgl.select("a", choices)
    with pytest.raises(ValueError, match=r"choices\[1\] is empty"):
        sgl.gen("a", choices=["x", ""])
    with pytest.raises(ValueError, match=r"temperature must be 0, got 0\.7"):
        sgl.select("a", ["x"], temperature=0.7)


def test_gen_with_choices_selects_and_with_a_temperature_draws_one(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a", choices=["p", "q"]) + sgl.gen("b", choices=["p", "q"], temperature=1.0)

    program.run()
    selection, drawn = echo.calls
    assert isinstance(selection, Score)
    assert isinstance(drawn, Generate)
    assert drawn.sampling.choices == ("p", "q")


def test_the_value_of_a_dtype_is_its_text_as_in_sglang() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.gen_int("i") + sgl.gen_string("s") + sgl.gen("b", dtype=bool)
        s += "i is " + s["i"]

    backend = Echo(["42", '"x"', "True"])
    state = program.run(backend=backend)
    assert (state["i"], state["s"], state["b"]) == ("42", '"x"', "True")
    assert all(call.sampling.regex for call in backend.calls if isinstance(call, Generate))


def test_options_of_gen_are_stronger_than_those_of_the_run(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a") + sgl.gen("b", 5, stop="!", temperature=0.0, seed=1, stop_regex=r"\d+")

    program.run(temperature=0.5, stop=["\n", "end"], top_p=0.9, return_logprob=True, top_logprobs_num=2)
    first, second = (call for call in echo.calls if isinstance(call, Generate))
    assert first.sampling == Sampling(max_new_tokens=128, temperature=0.5, stop=("\n", "end"), top_p=0.9)
    assert second.sampling == Sampling(
        max_new_tokens=5, temperature=0.0, stop=("!",), top_p=0.9, seed=1, stop_regex=(r"\d+",)
    )
    assert first.logprobs == Logprobs(top=2)


def test_wrong_arguments_are_errors_where_they_are_written() -> None:
    with pytest.raises(TypeError, match="unknown option: max_token"):
        sgl.gen("a", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Expected `int \| null`, got `str` - at `\$.max_new_tokens`"):
        sgl.gen("a", max_tokens="3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only one of dtype, regex"):
        sgl.gen("a", dtype=int, regex="x")
    with pytest.raises(TypeError, match="token ids must be integers"):
        sgl.ids([-1])
    with pytest.raises(NotImplementedError, match="images are not supported"):
        sgl.image("x.png")
    with pytest.raises(NotImplementedError, match="videos are not supported"):
        sgl.video("x.mp4", 3)


def test_text_stands_on_either_side_of_an_expression() -> None:
    a, b, x, y = Generation("a"), Generation("b"), Constant("x"), Constant("y")
    assert "x" + a == Concat((x, a))
    assert a + "x" == Concat((a, x))
    assert "x" + a + "y" + b == Concat((x, a, y, b))


# The arguments that SGLang's functions have, in their order.
SGLANG = {
    sgl.gen: (
        "name max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p "
        "frequency_penalty presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs dtype choices choices_method regex json_schema"
    ),
    sgl.gen_int: (
        "name max_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
        "presence_penalty ignore_eos return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs"
    ),
    sgl.select: "name choices temperature choices_method",
}
SGLANG[sgl.gen_string] = SGLANG[sgl.gen_int]


@pytest.mark.parametrize("function", SGLANG)
def test_arguments_have_the_places_that_they_have_in_sglang(function: Any) -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    assert " ".join(p.name for p in parameters if p.kind in kinds) == SGLANG[function]


def test_arguments_by_place_are_those_by_name() -> None:
    by_place = sgl.gen(
        "a", 9, 2, 3, ["x"], [7], "y+", 0.5, 0.9, 5, 0.1, 0.2, 0.3, True, True, 1, 2, True,
        None, None, None, "z+",
    )  # fmt: skip
    by_name = sgl.gen(
        "a", max_tokens=9, min_tokens=2, n=3, stop=["x"], stop_token_ids=[7], stop_regex="y+",
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        ignore_eos=True, return_logprob=True, logprob_start_len=1, top_logprobs_num=2,
        return_text_in_logprobs=True, regex="z+",
    )  # fmt: skip
    assert by_place == by_name
    sampling = Sampling(
        max_new_tokens=9, min_new_tokens=2, n=3, stop=("x",), stop_token_ids=(7,), stop_regex=("y+",),
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        ignore_eos=True, regex="z+",
    )  # fmt: skip
    assert by_place == Generation("a", sampling, Logprobs(top=2, start=1, texts=True))
    assert sgl.gen_string("a", 9, 3, "x", [7]) == sgl.gen(
        "a", 9, n=3, stop="x", stop_token_ids=[7], dtype=str
    )


def test_an_empty_list_of_stops_is_stronger_than_the_run_s(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a", stop=[], stop_token_ids=[], stop_regex=[]) + sgl.gen("b", dtype=bool)

    program.run(stop=["x"], stop_token_ids=[1], stop_regex="y")
    none, of_the_run = (call.sampling for call in echo.calls if isinstance(call, Generate))
    assert none == Sampling(max_new_tokens=128)
    assert of_the_run.stop == ("x",)
    program.options(stop="x").run(stop=[])
    assert echo.calls[-1].sampling.stop is None  # type: ignore[union-attr]


UNFIT: list[dict[str, Any]] = [
    {"min_tokens": 2},
    {"n": 3},
    {"stop": "q"},
    {"stop_token_ids": [1]},
    {"stop_regex": "q"},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5},
    {"ignore_eos": True},
    {"top_logprobs_num": 2},
    {"logprobs": 2},
]


@pytest.mark.parametrize("given", UNFIT, ids=str)
def test_what_a_selection_would_leave_out_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    for temperature in (None, 0.0):
        with pytest.raises(ValueError, match=f"{name} cannot be used with choices"):
            sgl.gen("a", choices=["p", "q"], temperature=temperature, **given)
    assert isinstance(sgl.gen("a", choices=["p", "q"], temperature=1.0, **given), Generation)


def test_what_changes_no_selection_may_be_there() -> None:
    quiet: dict[str, Any] = {
        "max_tokens": 3, "n": 1, "stop": [], "temperature": 0.0, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "seed": 3, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "ignore_eos": False,
        "return_logprob": True, "logprob_start_len": -1, "skip_special_tokens": False,
    }  # fmt: skip
    assert sgl.gen("a", choices=["p", "q"], **quiet) == sgl.select("a", ["p", "q"])


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    "given", [{"regex": "x"}, {"dtype": int}, {"json_schema": {}}, {"ebnf": "root ::= 'a'"}], ids=str
)
def test_choices_and_another_constraint_are_refused(given: dict[str, Any], temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"only one of .*choices can say"):
        sgl.gen("a", choices=["p", "q"], temperature=temperature, **given)


def test_a_choices_method_needs_choices_that_are_scored() -> None:
    method = sgl.greedy_token_selection
    selection = sgl.gen("a", choices=["p", "q"], choices_method=method)
    assert selection == Selection("a", ("p", "q"), method)
    for given in ({}, {"choices": ["p", "q"], "temperature": 1.0}):
        with pytest.raises(ValueError, match="choices_method says how a select decides"):
            sgl.gen("a", choices_method=method, **given)  # type: ignore[arg-type]


def test_a_selection_tells_where_the_template_has_changed_what_came_before() -> None:
    class Rewrites(Echo):
        async def score(self, call: Score) -> Answer:
            answer = await super().score(call)
            answer.rewritten = (1,)
            return answer

    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.user("Hi") + sgl.assistant(sgl.select("a", ["p", "q"]))

    assert program.run(backend=Rewrites()).get_meta_info("a")["rewritten"] == [1]
    assert "rewritten" not in program.run(backend=Echo()).get_meta_info("a")
