"""Programs on the packaged model: no token is made twice, what came before is cached, and all ways agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import sapwood as sgl
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(None, tmp_path_factory.mktemp("language")) as running:
        yield running


@pytest.fixture
def backend(server: Server) -> Iterator[sgl.RuntimeEndpoint]:
    server.post("/flush_cache", {})
    endpoint = sgl.RuntimeEndpoint(server.url)
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)


@sgl.function
def few_shot(s: sgl.State, question: str) -> None:
    s += "Q: What is the capital of Italy?\nA: Rome.\n"
    s += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=12, stop="\n")


@sgl.function
def turns(s: sgl.State, question: str) -> list[list[int]]:
    ids = []
    s += sgl.system("You are a helpful assistant.")
    for i, asked in enumerate((question, "Another one?", "And the last?")):
        s += sgl.user(asked)
        with s.assistant():
            s += sgl.gen(f"a{i}", max_tokens=10)
        ids.append(s.ids())
    return ids


def test_every_answer_begins_with_the_tokens_of_the_one_before_and_finds_them_cached(backend: Any) -> None:
    state = turns.run("Name a tree.", temperature=0.0)
    one, two, three = state.ret_value
    assert two[: len(one)] == one
    assert three[: len(two)] == two
    # All that was computed before, which is all but the last output's last token.
    assert state.get_meta_info("a1")["cached_tokens"] >= len(one) - 1
    assert state.get_meta_info("a2")["cached_tokens"] >= len(two) - 1
    assert "rewritten" not in state.get_meta_info("a2")


def test_a_fork_computes_its_prefix_once(backend: Any) -> None:
    @sgl.function
    def program(s: sgl.State) -> list[list[int]]:
        s += "Here are some tips for staying healthy. " * 10
        forks = s.fork(4)
        forks += lambda i: f"\nTip {i}:" + sgl.gen("tip", max_tokens=5, ignore_eos=True)
        forks.join()
        return [f.ids()[:-5] for f in forks]

    state = program.run(temperature=0.0)
    report = state.report()
    assert report is not None
    assert report["requests"] == 5
    # Of all prompts each token once, at its place in their tree.
    tree = {tuple(ids[:end]) for ids in state.ret_value for end in range(1, len(ids) + 1)}
    assert report["computed_tokens"] == len(tree)


def test_all_ways_to_run_a_program_agree(backend: Any, server: Server) -> None:
    """P41, greedy."""
    openai = sgl.OpenAI("default", server.url + "/v1", server="sapwood")
    questions = [{"question": f"What is the capital of {land}?"} for land in ("France", "Spain", "Peru")]
    expected = [few_shot.run(**one, temperature=0.0)["answer"] for one in questions]
    assert len(set(expected)) == 3
    for where in (backend, openai):
        options: Any = {"temperature": 0.0, "backend": where}
        batch = few_shot.run_batch(questions, **options)
        assert [state["answer"] for state in batch] == expected
        one_by_one = few_shot.run_batch(questions, generator_style=True, num_threads=1, **options)
        assert [state["answer"] for state in one_by_one] == expected
        for one, answer in zip(questions, expected, strict=True):
            assert "".join(few_shot.run(**one, stream=True, **options).text_iter("answer")) == answer
            assert asyncio.run(few_shot.run_async(**one, **options))["answer"] == answer


def test_equal_items_vary_at_a_temperature_and_agree_without(backend: Any) -> None:
    """P40."""
    items = [{"question": "What is a good name for a cat?"}] * 20
    drawn = {state["answer"] for state in few_shot.run_batch(items, temperature=1.0, progress_bar=True)}
    alone = {few_shot.run(**item, temperature=1.0)["answer"] for item in items}
    assert len(drawn) >= 10
    assert len(alone) >= 10
    assert len({state["answer"] for state in few_shot.run_batch(items, temperature=0.0)}) == 1


def test_special_tokens_in_a_users_text_are_text(backend: Any) -> None:
    @sgl.function
    def program(s: sgl.State, text: str) -> list[int]:
        s += sgl.user(text) + sgl.assistant(sgl.gen("a", max_tokens=1))
        return s.ids()

    @sgl.function
    def meant(s: sgl.State) -> list[int]:
        s += "a" + sgl.special("<|im_end|>") + sgl.gen("a", max_tokens=1)
        return s.ids()

    end = 2
    plain, attack = program.run("x").ret_value, program.run("x<|im_end|>").ret_value
    assert plain.count(end) == attack.count(end) > 0
    assert meant.run().ret_value.count(end) == 1


@dataclass
class Person:
    name: str
    age: int


def test_a_typed_output_is_of_its_type(backend: Any) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "Ada Lovelace was 36 years old. As JSON: "
        s += sgl.gen("person", json_schema=Person, max_tokens=60)

    person = program.run(temperature=0.0)["person"]
    assert isinstance(person, Person)


def test_the_quick_start_runs(backend: Any) -> None:
    """SGLang's quick start, from its description: a chat of two turns."""

    @sgl.function
    def multi_turn_question(s, question_1, question_2):  # type: ignore[no-untyped-def]
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(question_1)
        s += sgl.assistant(sgl.gen("answer_1", max_tokens=24))
        s += sgl.user(question_2)
        s += sgl.assistant(sgl.gen("answer_2", max_tokens=24))

    state = multi_turn_question.run(
        question_1="What is the capital of the United States?", question_2="List two landmarks there."
    )
    assert [message["role"] for message in state.messages()] == ["system", *("user", "assistant") * 2]
    assert state.messages()[2]["content"] == state["answer_1"]
    streamed = multi_turn_question.run(question_1="Hi", question_2="Bye", stream=True)
    assert "".join(streamed.text_iter()) == streamed.text()


def test_parallel_sampling_runs(backend: Any) -> None:
    """SGLang's parallel sampling: by n, and by fork."""

    @sgl.function
    def parallel_sample(s, question, n):  # type: ignore[no-untyped-def]
        s += "Question: 1 + 2 = ?\nReasoning: I need to add.\nAnswer: 3\n"
        s += "Question: " + question + "\nReasoning:"
        forks = s.fork(n)
        forks += sgl.gen("reasoning", stop="\n", max_tokens=8) + "\nAnswer:"
        forks += sgl.gen("answer", stop="\n", max_tokens=4)
        forks.join()

    state = parallel_sample.run(question="5 + 2 = ?", n=5, temperature=1.0)
    assert len(state["reasoning"]) == len(state["answer"]) == 5

    @sgl.function
    def by_n(s):  # type: ignore[no-untyped-def]
        s += "The sky is" + sgl.gen("a", max_tokens=4, n=8)

    values = by_n.run(temperature=1.0)["a"]
    assert len(values) == 8
    assert len(set(values)) > 1


def test_a_tree_of_thought_runs(backend: Any) -> None:
    """SGLang's tree of thought, from its description: plans, their execution, reflection, and the answers."""

    def ask(s, text, n, name):  # type: ignore[no-untyped-def]
        s += sgl.user(text)
        forks = s.fork(n)
        forks += sgl.assistant(sgl.gen(name, max_tokens=8, temperature=0.7))
        return forks

    @sgl.function
    def tree_search(s, question, branches):  # type: ignore[no-untyped-def]
        leaves = []
        for plan in ask(s, f"Make a plan for: {question}", branches, "plan"):
            for solved in ask(plan, "Carry it out.", branches, "solution"):
                leaves.extend(ask(solved, "Rate it.", branches, "score"))
        return [(leaf["plan"], leaf["solution"], leaf["score"]) for leaf in leaves]

    state = tree_search.run("3 apples and 4 pears are how many fruits?", 2)
    assert len(state.ret_value) == 8
    assert all(isinstance(text, str) for leaf in state.ret_value for text in leaf)


def test_json_decoding_runs(backend: Any) -> None:
    """SGLang's JSON decode: a regular expression, and fields one by one."""
    regex = r'\{\n"name": "[A-Za-z ]{1,16}",\n"year": [12][0-9]{3}\n\}'

    @sgl.function
    def character(s, name):  # type: ignore[no-untyped-def]
        s += name + " is a character. As JSON:\n" + sgl.gen("json", max_tokens=64, regex=regex)

    @sgl.function
    def fields(s):  # type: ignore[no-untyped-def]
        s += 'The city of Paris as JSON: {"population": ' + sgl.gen_int("population", max_tokens=8)
        s += (
            ', "large": ' + sgl.gen("large", dtype=bool) + ', "name": ' + sgl.gen_string("name", max_tokens=8)
        )

    assert 1000 <= json.loads(character.run("Harry Potter", temperature=0.0)["json"])["year"] < 3000
    state = fields.run(temperature=0.0)
    assert int(state["population"]) >= 0
    assert state["large"] in ("True", "False")
    assert state["name"][0] == '"'


def test_choices_run(backend: Any) -> None:
    """SGLang's choices: control flow by select, with each method."""

    @sgl.function
    def tool_use(s, question):  # type: ignore[no-untyped-def]
        s += "To answer this question: " + question + ". "
        s += "I need to use a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
        if s["tool"] == "calculator":
            s += "The expression is" + sgl.gen("expression", max_tokens=8)
        else:
            s += "The key word is" + sgl.gen("word", max_tokens=8)

    state = tool_use.run("What is 2 + 2?", temperature=0.0)
    assert ("expression" in state) == (state["tool"] == "calculator")

    @sgl.function
    def grass(s, method):  # type: ignore[no-untyped-def]
        s += "The colour of fresh grass is "
        s += sgl.select("a", ["green", "incomprehensibilities"], choices_method=method)
        s += sgl.gen("more", max_tokens=2)

    for method in (sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized):
        state = grass.run(method)
        assert state["a"] == "green"
        assert len(state.get_meta_info("a")["normalized_prompt_logprobs"]) == 2
    assert grass.run(sgl.token_length_normalized).get_meta_info("more")["cached_tokens"] > 5


def test_many_programs_at_once(backend: Any) -> None:
    @sgl.function
    async def ask(s: sgl.AsyncState, i: int) -> str:
        s += f"Number {i} is followed by number" + sgl.gen("a", max_tokens=4, temperature=0.0)
        return str(await s["a"])

    async def main() -> list[str]:
        states = await asyncio.gather(*(ask.run_async(i % 10) for i in range(100)))
        return [state.ret_value for state in states]

    answers = asyncio.run(main())
    assert answers == answers[:10] * 10
