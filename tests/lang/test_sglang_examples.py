"""SGLang's own example programs, written anew from what they do: they run after changing the import.

What is untyped here is so there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from math import exp
from typing import Annotated, Any

import pytest
from msgspec import Meta
from pydantic import BaseModel, Field

import sapwood as sgl
from sapwood.lang.choices import mean
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(None, tmp_path_factory.mktemp("examples")) as running:
        yield running


@pytest.fixture(autouse=True)
def backend(server: Server) -> Iterator[None]:
    server.post("/flush_cache", {})
    sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
    yield
    sgl.set_default_backend(None)


@sgl.function
def few_shot_qa(s, question):  # type: ignore[no-untyped-def]
    s += "The following are questions with answers.\n\n"
    s += "Q: What is the capital of France?\nA: Paris\n"
    s += "Q: What is the capital of Germany?\nA: Berlin\n"
    s += "Q: What is the capital of Italy?\nA: Rome\n"
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=8)


def test_few_shot_question_answering() -> None:
    state = few_shot_qa.run(question="What is the capital of Japan?")
    assert "Tokyo" in state["answer"]
    assert "\n" not in state["answer"]
    assert state.text().endswith("A:" + state["answer"])


def test_a_batch_has_its_prefix_computed_once_and_agrees_with_single_runs() -> None:
    questions = [
        {"question": f"What is the capital of {x}?"} for x in ("Spain", "Japan", "the United Kingdom")
    ]
    states = few_shot_qa.run_batch(questions, num_threads=2, progress_bar=True)
    assert [s["answer"] for s in states] == [few_shot_qa.run(**one)["answer"] for one in questions]
    assert len({s["answer"] for s in states}) == 3
    shared = states[0].get_meta_info("answer")["cached_tokens"]
    assert shared > 40
    assert all(s.get_meta_info("answer")["cached_tokens"] >= shared for s in states)


@sgl.function
def multi_turn_question(s, question_1, question_2):  # type: ignore[no-untyped-def]
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=12))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=12))


ASKED = {"question_1": "What is the capital of France?", "question_2": "List two sights there."}


def test_a_variable_is_streamed_to_threads_and_loops() -> None:
    whole = multi_turn_question.run(**ASKED, temperature=0)["answer_2"]
    state = multi_turn_question.run(**ASKED, temperature=0, stream=True)
    pieces = list(state.text_iter(var_name="answer_2"))
    assert len(pieces) > 1
    assert "".join(pieces) == whole

    async def show() -> list[Any]:
        state = multi_turn_question.run(**ASKED, temperature=0, stream=True)
        return [piece async for piece in state.text_async_iter("answer_2", return_meta_data=True)]

    told = asyncio.run(show())
    assert "".join(text for text, _ in told) == whole
    assert told[-1][1]["finish_reason"]["type"] in ("stop", "length")


def test_tips_are_expanded_side_by_side_and_summed_up() -> None:
    @sgl.function
    def tip_suggestion(s):  # type: ignore[no-untyped-def]
        s += "Here are two tips for staying healthy: 1. Balanced Diet. 2. Regular Exercise.\n\n"
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f"Now, expand tip {i + 1} into a paragraph:\n"
            f += sgl.gen("detailed_tip", max_tokens=16, stop="\n\n")
        s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
        s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
        s += "In summary" + sgl.gen("summary", max_tokens=16)

    state = tip_suggestion.run(temperature=0)
    tips = re.search(r"Tip 1:(.*?)\nTip 2:(.*?)\nIn summary", state.text(), re.DOTALL)
    assert tips is not None
    assert tips.group(1) != tips.group(2)
    assert state.text().endswith("In summary" + state["summary"])


def test_a_regular_expression_makes_an_address() -> None:
    @sgl.function
    def address(s):  # type: ignore[no-untyped-def]
        s += "Q: What is the IP address of the Google DNS servers?\nA: "
        s += sgl.gen(
            "answer",
            temperature=0,
            regex=r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
        )

    assert ipaddress.ip_address(address.run()["answer"]).version == 4


def test_a_regular_expression_of_other_letters() -> None:
    @sgl.function
    def chinese(s):  # type: ignore[no-untyped-def]
        s += "Beijing in Chinese: " + sgl.gen(
            "name", regex="(北京|上海|成都)(市|)", temperature=0, max_tokens=32
        )

    assert chinese.run()["name"].removesuffix("市") in ("北京", "上海", "成都")


CHARACTER = (
    r'\{\n    "name": "[\w\d\s]{1,16}",\n    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "wand": \{\n        "length": [0-9]{1,2}\.[0-9]{1,2}\n    \},\n    "alive": "(Alive|Deceased)"\n\}'
)


def test_json_by_a_regular_expression() -> None:
    @sgl.function
    def character_gen(s, name):  # type: ignore[no-untyped-def]
        s += name + " is a character in Harry Potter. The JSON output is:\n"
        s += sgl.gen("json_output", max_tokens=128, regex=CHARACTER)

    for state in character_gen.run_batch([("Hermione Granger",), ("Draco Malfoy",)], temperature=0):
        assert re.fullmatch(CHARACTER, state["json_output"])
        found = json.loads(state["json_output"])
        assert found["house"] in ("Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff")
        assert isinstance(found["wand"]["length"], float)


class Weapon(StrEnum):
    sword = "sword"
    axe = "axe"
    bow = "bow"


class Wizard(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=999)
    weapon: Weapon


def test_json_by_a_schema() -> None:
    """As a model, of which the value then is, and as its schema in a text, as SGLang takes it."""

    @sgl.function
    def wizard_gen(s, schema):  # type: ignore[no-untyped-def]
        s += "Give me a description of a wizard in the JSON format.\n"
        s += sgl.gen("character", max_tokens=128, temperature=0, json_schema=schema)

    wizard = wizard_gen.run(Wizard)["character"]
    assert isinstance(wizard, Wizard)
    (alone,) = wizard_gen.run(Annotated[list[Wizard], Meta(min_length=1, max_length=1)])["character"]
    assert isinstance(alone, Wizard)
    text = wizard_gen.run(json.dumps(Wizard.model_json_schema()))["character"]
    assert isinstance(text, str)
    assert isinstance(Wizard.model_validate_json(text).weapon, Weapon)


@sgl.function
def tool_use(s, question):  # type: ignore[no-untyped-def]
    s += "To answer this question: " + question + ". "
    s += "I need to use a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The math expression is" + sgl.gen("expression", max_tokens=8)
    elif s["tool"] == "search engine":
        s += "The key word to search is" + sgl.gen("word", max_tokens=8)


def test_choices_steer_a_program_and_their_logprobs_are_told(server: Server) -> None:
    states = [tool_use.run("What is 5 + 5?", temperature=0)]
    states += tool_use.run_batch([{"question": q} for q in ("What is 5 + 6?", "Who is Michael Jordan?")])
    for state in states:
        assert ("expression" in state, "word" in state) == (
            state["tool"] == "calculator",
            state["tool"] == "search engine",
        )
        meta = state.get_meta_info("tool")
        for choice, told, normal in zip(
            ("calculator", "search engine"),
            meta["input_token_logprobs"],
            meta["normalized_prompt_logprobs"],
            strict=True,
        ):
            ids = [token for _, token, _ in told]
            assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == choice
            assert normal == mean([value for value, _, _ in told])
        best = max(meta["normalized_prompt_logprobs"])
        tools = ("calculator", "search engine")
        assert state["tool"] == tools[meta["normalized_prompt_logprobs"].index(best)]


def test_roles_are_the_same_however_they_are_written() -> None:
    @sgl.function
    def by_calls(s):  # type: ignore[no-untyped-def]
        s += sgl.system("Be brief.") + sgl.user("Hi!") + sgl.assistant("So: " + sgl.gen("a", max_tokens=4))

    @sgl.function
    def by_pairs(s):  # type: ignore[no-untyped-def]
        s += sgl.system_begin() + "Be brief." + sgl.system_end()
        s += sgl.user_begin() + "Hi" + "!" + sgl.user_end()
        s += sgl.assistant_begin() + "So: "
        s += sgl.gen("a", max_tokens=4)
        s += sgl.assistant_end()

    @sgl.function
    def by_blocks(s):  # type: ignore[no-untyped-def]
        s.system("Be brief.")
        with s.user():
            s += "Hi"
            s += "!"
        with s.assistant():
            s += "So: " + sgl.gen("a", max_tokens=4)

    states = [program.run(temperature=0) for program in (by_calls, by_pairs, by_blocks)]
    assert states[0].ids() == states[1].ids() == states[2].ids()
    assert states[0].messages() == states[1].messages() == states[2].messages()
    assert states[0].messages()[2]["content"] == "So: " + states[0]["a"]


def test_decoding_that_branches_at_the_first_token() -> None:
    """CoT decoding: the likeliest first tokens, each gone on with, judged by how sure the model then is."""

    @sgl.function
    def cot_decoding(s, question, top_k):  # type: ignore[no-untyped-def]
        s += sgl.user("Question: " + question + "\nAnswer:")
        s += sgl.assistant_begin()
        step_0 = s.fork(1)[0]
        forks = s.fork(top_k)
        step_0 += sgl.gen(
            "top", max_tokens=1, return_logprob=True, top_logprobs_num=top_k, return_text_in_logprobs=True
        )
        first = step_0.get_meta_info("top")["output_top_logprobs"][0]
        paths = []
        for f, (logprob, _, text) in zip(forks, first, strict=True):
            f += text
            f += sgl.gen("answer", temperature=0, max_tokens=12, return_logprob=True, top_logprobs_num=2)
            tops = f.get_meta_info("answer")["output_top_logprobs"]
            sure = sum(exp(one[0]) - exp(two[0]) for one, two in tops) / len(tops)
            paths.append((logprob, text, f["answer"], sure))
        return paths

    paths = cot_decoding.run("How many eggs are in two dozen?", 3, temperature=0).ret_value
    assert len(paths) == 3
    assert [path[0] for path in paths] == sorted((path[0] for path in paths), reverse=True)
    assert len({path[1] for path in paths}) == 3
    assert all(0 <= sure <= 1 for *_, sure in paths)


def test_stages_of_branches_and_a_synthesis() -> None:
    @sgl.function
    def sweep(s, context, items):  # type: ignore[no-untyped-def]
        s += context + "\n"
        forks = s.fork(len(items))
        for i, item in enumerate(items):
            forks[i] += f"--- {item} ---\nAnalysis:"
            forks[i] += sgl.gen(f"analysis_{item}", max_tokens=12, stop="\n\n")
        s += "All of them:\n"
        for i, item in enumerate(items):
            s += f"\n[{item}] " + forks[i][f"analysis_{item}"]
        s += "\n\nThe best is" + sgl.gen("pick", max_tokens=8)

    trees = ["oak", "birch", "pine"]
    state = sweep.run(
        "You compare trees by their wood. Say how hard and how light each is.", trees, temperature=0
    )
    assert [tree for tree in trees if f"[{tree}] " in state.text()] == trees
    report = state.report()
    assert report is not None
    assert report["requests"] == 5
    # The context was computed once: the others had it in the cache.
    assert report["cached_tokens"] >= 3 * 16


def test_at_least_so_many_tokens() -> None:
    @sgl.function
    def long_answer(s):  # type: ignore[no-untyped-def]
        s += sgl.user("Say yes.")
        s += sgl.assistant(sgl.gen("answer", min_tokens=40, max_tokens=48))

    told = long_answer.run(temperature=0).get_meta_info("answer")
    assert 40 <= told["completion_tokens"] <= 48


def test_several_outputs_of_an_openai_endpoint(server: Server) -> None:
    @sgl.function
    def story(s):  # type: ignore[no-untyped-def]
        s += sgl.user("Write the name of a hero.")
        s += sgl.assistant(sgl.gen("hero", max_tokens=6, n=4))

    state = story.run(temperature=1.0, backend=sgl.OpenAI("default", server.url + "/v1", api_key="none"))
    assert len(state["hero"]) == 4
    assert state.messages()[-1]["content"] == state["hero"][0]
    assert len(state.get_meta_info("hero")) == 4


def test_the_quick_start_runs() -> None:
    """A chat of two turns."""
    state = multi_turn_question.run(**ASKED)
    assert [message["role"] for message in state.messages()] == ["system", *("user", "assistant") * 2]
    assert state.messages()[2]["content"] == state["answer_1"]
    streamed = multi_turn_question.run(question_1="Hi", question_2="Bye", stream=True)
    assert "".join(streamed.text_iter()) == streamed.text()


def test_parallel_sampling_runs() -> None:
    """By fork, and by n."""

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


def test_a_tree_of_thought_runs() -> None:
    """Plans, their execution, and how good they were."""

    def ask(s: sgl.State, text: str, n: int, name: str) -> Any:
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
