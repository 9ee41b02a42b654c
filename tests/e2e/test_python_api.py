"""The offline API on real engines: one server and a pair give the same tokens; the documentation's programs run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pdserve
from pdserve import LLM, BatchError, InvalidRequestError, SamplingParams
from pdserve.errors import ConfigError, EngineDeadError
from pdserve.launch_local import THREAD_VARIABLES
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, Family

pytestmark = pytest.mark.usefixtures("forked_hosts")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python-api.md"
SMALL: dict[str, Any] = {
    "max_total_tokens": 16384, "max_model_len": 2048, "max_num_seqs": 16, "device": "cpu", "dtype": "float32",
    "cpu_threads": 1,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
QUIET: dict[str, Any] = {"use_tqdm": False}
PROMPTS = [[(7 * i + 3 * j) % (VOCAB_SIZE - 3) + 3 for j in range(1 + 9 * i)] for i in range(8)]
GONE_S = 20.0


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[Family], Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def mono(model: str) -> Iterator[LLM]:
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[LLM]:
    with LLM(model, disaggregation=True, **SMALL) as llm:
        yield llm


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def tokens(outputs: list[pdserve.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_one_server_and_a_pair_give_the_same_tokens_in_the_order_of_the_prompts(
    mono: LLM, pair: LLM, model: str
) -> None:
    loaded = load_reference(Path(model))
    expected = [reference_greedy(loaded, prompt, 6) for prompt in PROMPTS]
    assert tokens(mono.generate(PROMPTS, GREEDY, **QUIET)) == expected
    many = [PROMPTS[i % len(PROMPTS)] for i in range(80)]
    outputs = pair.generate(many, GREEDY, **QUIET)
    assert tokens(outputs) == [expected[i % len(PROMPTS)] for i in range(80)]
    assert [output.prompt_token_ids for output in outputs] == many
    assert len({output.request_id for output in outputs}) == 80


def test_what_is_drawn_at_random_follows_from_the_seed(model: str, mono: LLM, pair: LLM) -> None:
    params = SamplingParams(max_tokens=4, n=3, seed=5, logprobs=2, prompt_logprobs=1)
    (first,), (second,) = (llm.generate("What is the capital?", params, **QUIET) for llm in (mono, pair))
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in second.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) > 1
    for output in (first, second):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        told = [line for line in output.prompt_logprobs[1:] if line is not None]
        assert [next(iter(line)) for line in told] == output.prompt_token_ids[1:]
        for answer in output.outputs:
            assert answer.logprobs is not None
            own = [line[token].logprob for line, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            assert answer.cumulative_logprob == pytest.approx(sum(own))
            assert all(2 <= len(line) <= 3 for line in answer.logprobs)


def test_fields_of_both_families_work_on_the_pair(pair: LLM) -> None:
    (output,) = pair.generate("ab", {"max_new_tokens": 3, "temperature": 0, "regex": "[xy]{40}"}, **QUIET)
    assert re.fullmatch("[xy]{1,3}", output.outputs[0].text)
    assert (output.outputs[0].finish_reason, output.prompt) == ("length", "ab")
    free = tokens(pair.generate([[5, 6, 7]], GREEDY, **QUIET))[0]
    stop = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[free[2]])
    answer = pair.generate([[5, 6, 7]], stop, **QUIET)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", free[2], free[2])


def test_cached_prefixes_can_be_forgotten(mono: LLM, pair: LLM) -> None:
    for llm in (mono, pair):
        prompt = {"prompt_token_ids": [*range(100, 164), *range(100, 164)]}

        def cached(llm: LLM = llm, prompt: Any = prompt) -> int:
            (output,) = llm.generate(prompt, llm.get_default_sampling_params(), use_tqdm=False)
            return output.num_cached_tokens

        cached()
        assert cached() > 0
        assert llm.reset_prefix_cache() is True
        assert cached() == 0


def test_conversations_go_through_the_template(mono: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    one, two = mono.chat([conversation, conversation], [GREEDY, {"max_tokens": 2, "temperature": 0}], **QUIET)
    assert one.prompt == two.prompt == "user: Hi\nassistant:"
    assert one.outputs[0].token_ids[:2] == two.outputs[0].token_ids
    ids = mono.get_tokenizer().encode(one.prompt, add_special_tokens=False)
    assert one.prompt_token_ids == ids
    (raw,) = mono.generate(ids, GREEDY, **QUIET)
    assert raw.outputs[0].text == one.outputs[0].text


def test_wrong_arguments_are_refused_before_anything_runs(mono: LLM) -> None:
    for prompts, params, field in (
        ([[3], [VOCAB_SIZE]], GREEDY, "prompts"),
        ("a" * 5000, GREEDY, "prompts"),
        ("a", {"max_tokens": 5000}, "max_tokens"),
        ("a", {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ("a", {"regex": "("}, "regex"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            mono.generate(prompts, params, **QUIET)
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        mono.chat([[{"role": "user", "content": "a"}], [{"role": "user"}]], **QUIET)


def test_an_interrupt_aborts_the_call_and_the_llm_stays_usable(pair: LLM) -> None:
    class Interrupting:
        """A progress bar; the first answer brings a Ctrl-C."""

        closed = False

        def __init__(self, **_: Any) -> None:
            pass

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert "toks/s" in text

        def update(self, count: int) -> None:
            signal.raise_signal(signal.SIGINT)

        def close(self) -> None:
            Interrupting.closed = True

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            pair.generate(
                PROMPTS * 20, [GREEDY, *[SamplingParams(max_tokens=500, ignore_eos=True)] * 159], use_tqdm=Interrupting
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert Interrupting.closed
    assert len(pair.generate(PROMPTS, GREEDY, **QUIET)) == len(PROMPTS)


def test_the_first_program_of_the_documentation_runs_as_a_script(model: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(programs()[0].replace('"smollm2"', repr(model)))
    env = dict(os.environ) | dict.fromkeys(THREAD_VARIABLES, "1")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("The capital of France is ->")]
    assert "2/2" in done.stderr, "the bar"


def test_the_other_programs_of_the_documentation_run(pair: LLM) -> None:
    class Shared:
        """`pair`, which stays open."""

        def __init__(self, name: str, **flags: Any) -> None:
            assert name == "smollm2" and flags["disaggregation"]

        def __enter__(self) -> LLM:
            return pair

        def __exit__(self, *_: object) -> None:
            pass

    for program in programs()[1:]:
        exec(program, {"LLM": Shared, "SamplingParams": SamplingParams})


def test_a_server_that_refuses_its_flags_says_which(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model, max_model_len=1 << 20)
    assert caught.value.field == "context_length"


@pytest.mark.slow
def test_a_dead_server_fails_what_it_had_and_nothing_that_was_done_is_lost(model: str) -> None:
    before = psutil.Process().children()
    llm = LLM(model, num_prefill=1, num_decode=1, **SMALL)
    hosts = [child for child in psutil.Process().children() if child not in before]
    engines = [process for host in hosts for process in host.children(recursive=True)]
    killed = [host for host in hosts if "decode" in host.cmdline()][-1]

    class Killing:
        """A progress bar; the first answer is the end of a server."""

        def __init__(self, **_: Any) -> None:
            pass

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            pass

        def update(self, count: int) -> None:
            if killed.is_running():
                killed.kill()

        def close(self) -> None:
            pass

    long = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with pytest.raises(BatchError) as caught:
        llm.generate(PROMPTS, [GREEDY, *[long] * 7], use_tqdm=Killing)
    assert [output is None for output in caught.value.outputs] == [False, *[True] * 7]
    assert len(caught.value.outputs[0].outputs[0].token_ids) == 6  # type: ignore[union-attr]
    assert sorted(caught.value.errors) == list(range(1, 8))
    assert all(isinstance(error, EngineDeadError) for error in caught.value.errors.values())
    with pytest.raises(EngineDeadError):
        llm.generate("a", **QUIET)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a", **QUIET)
    wait_until_gone([*hosts, *engines])


@pytest.mark.slow
def test_no_process_outlives_a_program_that_is_killed(model: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = ["from pdserve import LLM", f"llm = LLM({model!r}, **{SMALL!r})", "print('up', flush=True)", "input()"]
    program.write_text("\n".join(lines))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, program], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        parent.kill()
        wait_until_gone(children)
