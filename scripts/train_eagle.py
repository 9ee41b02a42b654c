"""Trains a small EAGLE-3 head for a llama or qwen3 model, by default SmolLM2, on text that the model itself writes.

    python scripts/train_eagle.py                      30 minutes on two cores; prints the directory of the head
    pdserve serve --speculative-algorithm EAGLE3 --speculative-draft-model-path DIRECTORY

Three stages: the model answers prompts (`texts.jsonl`), the outputs of its layers over these texts are stored
(`hidden.bin`), and the head is trained. Each stage continues where an earlier run has ended. At its end a run writes
the head in the format of `LlamaForCausalLMEagle3`, and prints its accepted length on texts that were held out: the
tokens that a verify step of greedy decoding would give.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pdserve import LLM, SamplingParams
from pdserve.base.startup_times import StartupTimes
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.input_batch import build_batch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.model_loading import load, read_model
from pdserve.memory.kv_memory import PageTable
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import ModelSpec, read_model_spec
from pdserve.model.interface import LayerTaps
from pdserve.model.layers.kernels import inverse_frequencies
from pdserve.model.parallel import SingleRank
from pdserve.model.paths import cache_root, resolve_model_path, weight_files

TASKS = (
    "Explain {} to a child.", "Write a short story about {}.", "What are the benefits of {}?",
    "List five facts about {}.", "Why is {} important?", "How would you teach someone about {}?",
    "Write a poem about {}.", "What are common mistakes concerning {}?", "Summarize the history of {}.",
    "Write an email to a friend about {}.", "Compare {} with something similar.", "Give me three tips about {}.",
    "Describe {} in one paragraph.", "What questions do people ask about {}, and what are the answers?",
    "Write a dialogue between two people about {}.", "Write a Python function that has to do with {}.",
)  # fmt: skip
TOPICS = (
    "gravity", "the ocean", "baking bread", "machine learning", "the moon", "friendship", "electric cars", "volcanoes",
    "chess", "the French Revolution", "photosynthesis", "jazz music", "saving money", "the human heart", "bicycles",
    "ancient Egypt", "healthy breakfasts", "the speed of light", "learning a language", "dogs", "climate change",
    "public speaking", "the Roman Empire", "gardening", "prime numbers", "sleep", "the internet", "honey bees", "tea",
    "mountain climbing", "democracy", "the printing press", "dinosaurs", "meditation", "solar panels", "libraries",
    "the water cycle", "swimming", "black holes", "cooking pasta", "time management", "whales", "painting", "football",
    "the stock market", "antibiotics", "rainbows", "writing a diary", "airplanes", "the Great Wall of China", "robots",
    "vegetables", "earthquakes", "the guitar", "job interviews", "butterflies", "the periodic table", "coffee",
    "space travel", "a good neighbour", "sorting a list", "the number zero", "recycling", "winter", "a lost key",
    "the brain", "trains", "vaccines", "a small village", "the desert", "birthdays", "cats", "glaciers", "museums",
    "running", "the alphabet", "cheese", "thunderstorms", "a robot that feels", "fractions", "open source software",
    "rivers", "the telephone", "forests", "a brave girl", "clouds", "the violin", "clean energy", "reading strings",
    "bridges", "the calendar", "stress", "a trip to the market", "islands", "the color blue", "patience", "computers",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "penguins", "bicycle repair", "lightning", "an old clock", "weather", "kindness", "counting words",
)  # fmt: skip
MAX_LENGTH = 384
"""Most tokens of a text in training, prompt and answer together."""
BATCH_TEXTS, CAPTURE_TEXTS = 8, 8
DISCOUNT = 0.8
"""Weight of a draft relative to the one before it, in the loss."""
PAGE = 64
REPORT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Text:
    """A chat: token ids of the prompt and of the answer, which the model wrote greedily if `held_out`."""

    prompt: list[int]
    answer: list[int]
    held_out: bool

    @property
    def tokens(self) -> list[int]:
        """All token ids that are used."""
        return (self.prompt + self.answer)[:MAX_LENGTH]


def prompts(seed: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield prompts in a random order, every twentieth of them held out."""
    known, held_out = (
        [task.format(topic) for task in TASKS for topic in topics] for topics in (TOPICS, HELD_OUT_TOPICS)
    )
    shuffler = random.Random(seed)
    shuffler.shuffle(known)
    shuffler.shuffle(held_out)
    left = iter(held_out)
    for index, text in enumerate(known):
        if index % 20 == 0 and (other := next(left, None)) is not None:
            yield other, True
        yield text, False


def write_texts(args: argparse.Namespace, file: Path, deadline: float) -> list[Text]:
    """Have the model answer prompts until `deadline`, or until there are `--texts`; returns all answers so far."""
    texts = [Text(**json.loads(line)) for line in file.read_text().splitlines()] if file.is_file() else []
    asked = itertools.islice(prompts(), len(texts), args.texts)
    if len(texts) >= args.texts or time.monotonic() > deadline:
        return texts
    with LLM(args.model, max_running_requests=64) as llm, file.open("a") as out:
        while batch := list(itertools.islice(asked, 64)):
            params = [
                SamplingParams(temperature=0.0 if held_out or i % 2 else 0.8, max_tokens=args.max_tokens, seed=i)
                for i, (_, held_out) in enumerate(batch, len(texts))
            ]
            answers = llm.chat([[{"role": "user", "content": text}] for text, _ in batch], params, use_tqdm=False)
            for (_, held_out), answer in zip(batch, answers, strict=True):
                texts.append(Text(list(answer.prompt_token_ids), list(answer.outputs[0].token_ids), held_out))
                out.write(json.dumps(dataclasses.asdict(texts[-1])) + "\n")
            out.flush()
            print(f"{len(texts)} texts, {sum(len(text.answer) for text in texts)} tokens", flush=True)
            if time.monotonic() > deadline:
                break
    return texts


@dataclasses.dataclass(frozen=True)
class Captured:
    """What the head is trained on, by token of all texts, one text after the other.

    `hidden` bfloat16 `[tokens, 3 * hidden size]`: outputs of the tapped layers. `last` bfloat16
    `[tokens, hidden size]`: that of the last layer. `greedy` int64 `[tokens]`: the target's likeliest next token.
    `starts`: where texts begin.
    """

    hidden: Tensor
    last: Tensor
    greedy: Tensor
    starts: list[int]


def capture(model: str, spec: ModelSpec, taps: tuple[int, ...], texts: list[Text], file: Path) -> Captured:
    """Run the model over the texts, in bfloat16, and store what its layers put out."""
    lengths = [len(text.tokens) for text in texts]
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    size, layers = spec.hidden_size, (*taps, spec.num_layers - 1)
    shape, marker = (starts[-1], len(layers) * size + 4), file.with_suffix(".done")
    is_there = marker.is_file() and json.loads(marker.read_text()) == [*shape, *taps]
    stored = np.memmap(file, dtype=np.uint16, mode="r+" if is_there else "w+", shape=shape)
    found = torch.from_numpy(stored)
    hidden, greedy = found[:, :-4].view(torch.bfloat16), found[:, -4:].view(torch.int64)[:, 0]
    if not is_there:
        target = _Target(model)
        for first in range(0, len(texts), CAPTURE_TEXTS):
            span = slice(starts[first], starts[min(first + CAPTURE_TEXTS, len(texts))])
            states = target.run([text.tokens for text in texts[first : first + CAPTURE_TEXTS]], layers)
            hidden[span] = states.bfloat16()
            greedy[span] = target.greedy(states[:, -size:])
        stored.flush()
        marker.write_text(json.dumps([*shape, *taps]))
    return Captured(hidden[:, :-size], hidden[:, -size:], greedy, starts)


class _Target:
    """The model, without a server."""

    def __init__(self, name: str) -> None:
        config = ServerConfig(
            model=ModelConfig(model_path=name, dtype="bfloat16"),
            memory=MemoryConfig(page_size=PAGE),
            kernels=KernelConfig(device="cpu"),
        )
        wanted = read_model(config, resolve_model_path(name), torch.device("cpu"), SingleRank(), StartupTimes())
        loaded = load(wanted)
        self._model, self._layout = loaded.model, loaded.layout
        self._per_row = -(-MAX_LENGTH // PAGE)
        pool = KVPool(self._layout.groups[0], CAPTURE_TEXTS * self._per_row, torch.device("cpu"))
        self._attention = loaded.bind([pool])

    @torch.inference_mode()
    def run(self, rows: Sequence[list[int]], layers: Sequence[int]) -> Tensor:
        """Return the outputs of `layers` over some texts, side by side: `[tokens, len(layers) * hidden size]`."""
        table, width = PageTable(len(rows), self._per_row), max(map(len, rows))
        tokens = torch.zeros(len(rows), width, dtype=torch.int32)
        for index, row in enumerate(rows):
            table.open(list(range(index * self._per_row, (index + 1) * self._per_row)))
            tokens[index, : len(row)] = torch.tensor(row)
        plan = BatchPlan(0, tuple(BatchRow(str(i), i, 0, len(row), True) for i, row in enumerate(rows)))
        lengths = np.array([len(row) for row in rows])
        batch, taps = build_batch(read_plan(plan, table, lengths, self._layout), tokens), LayerTaps(layers)
        self._model.forward(batch, self._attention.begin(batch), taps=taps)
        return taps.hidden

    @torch.inference_mode()
    def greedy(self, last: Tensor) -> Tensor:
        """Return the likeliest token behind each output of the last layer."""
        return torch.cat([self._model.logits(part.contiguous()).argmax(-1) for part in last.split(256)])


class Head(nn.Module):
    """An EAGLE-3 head with the vocabulary `draft_tokens`. It starts from `weights` of the target."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], draft_tokens: Tensor) -> None:
        super().__init__()
        size, (heads,) = spec.hidden_size, spec.attentions
        self.size, self.heads, self.eps = size, heads, spec.rms_norm_eps
        inner = weights["model.layers.0.mlp.gate_proj.weight"].shape[0]
        self.register_buffer("inverse", inverse_frequencies(heads.rope, heads.head_dim), persistent=False)
        self.weight = nn.ParameterDict()
        q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        last = f"model.layers.{spec.num_layers - 1}."
        wide = {"q": q, "k": kv, "v": kv}
        for name, width in wide.items():
            of_hidden = weights[f"{last}self_attn.{name}_proj.weight"].float()
            self._new(f"midlayer.self_attn.{name}_proj", torch.cat((0.02 * torch.randn(width, size), of_hidden), 1))
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            self._new(f"midlayer.{name}", weights[f"{last}{name}.weight"].float())
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            source = name if name == "post_attention_layernorm" else "input_layernorm"
            self._new(f"midlayer.{name}", weights[f"{last}{source}.weight"].float())
        self._new("norm", weights["model.norm.weight"].float())
        last_tap = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1)
        self._new("fc", last_tap + 0.002 * torch.randn(size, 3 * size))
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self._new("lm_head", head[draft_tokens].float())
        assert self._of("midlayer.mlp.gate_proj").shape == (inner, size)

    def forward(self, embeds: Tensor, hidden: Tensor, num_steps: int) -> list[Tensor]:
        """Run the steps of the training-time test; returns the logits of each, `[texts, length, draft vocab]`.

        `embeds` `[texts, length, size]`; `hidden` `[texts, length, 3 * size]`. Slot j has token j and the states of
        position j - 1: the target's in step 0, then the head's own of the step before, which began at slot j - 1.
        """
        states = self._shifted(self._linear("fc", hidden))
        embeds = self._norm("midlayer.input_layernorm", embeds)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(num_steps):
            both = torch.cat((embeds, self._norm("midlayer.hidden_norm", states)), -1)
            q, k, v = (self._split(self._linear(f"midlayer.self_attn.{name}_proj", both)) for name in "qkv")
            q, k = self._rotated(q), self._rotated(k)
            keys.append(k)
            values.append(v)
            states = states + self._linear("midlayer.self_attn.o_proj", self._attend(q, keys, values, step))
            normed = self._norm("midlayer.post_attention_layernorm", states)
            gate, up = (self._linear(f"midlayer.mlp.{name}_proj", normed) for name in ("gate", "up"))
            states = states + self._linear("midlayer.mlp.down_proj", F.silu(gate) * up)
            found.append(self._linear("lm_head", self._norm("norm", states)))
            states = self._shifted(states)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by checkpoint name, in bfloat16."""
        return {f"{name.replace('/', '.')}.weight": value.detach().bfloat16() for name, value in self.weight.items()}

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], step: int) -> Tensor:
        """Attend from slot j to the slots up to j - `step` of step 0, and to one slot of each later step."""
        share, length = self.heads.num_heads // self.heads.num_kv_heads, q.shape[2]
        keys, values = ([each.repeat_interleave(share, 1) for each in kind] for kind in (keys, values))
        scale = self.heads.head_dim**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - step)
        scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, -1e9)]
        back = [(self._moved(keys[i], step - i), self._moved(values[i], step - i)) for i in range(1, step + 1)]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in back]
        weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
        mixed = weights[..., :length] @ values[0]
        for i, (_, v) in enumerate(back):
            mixed = mixed + weights[..., length + i, None] * v
        return mixed.transpose(1, 2).flatten(2)

    def _new(self, name: str, value: Tensor) -> None:
        self.weight[name.replace(".", "/")] = nn.Parameter(value.contiguous())

    def _of(self, name: str) -> Tensor:
        return self.weight[name.replace(".", "/")]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._of(name))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self._of(name)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.heads.head_dim).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None].float() * self.inverse
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def _shifted(self, x: Tensor) -> Tensor:
        """Move slots `[texts, length, size]` one position on; the first is zero."""
        return F.pad(x[:, :-1], (0, 0, 1, 0))

    def _moved(self, x: Tensor, count: int) -> Tensor:
        """Move slots `[texts, heads, length, dim]` by `count` positions."""
        return F.pad(x[:, :, : x.shape[2] - count], (0, 0, count, 0))


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Makes batches of texts, and computes the losses of a head over them.

    `norm` and `rows` `[draft vocab, size]` are of the target: its final norm, and its head for the draft tokens.
    `to_draft` `[vocab]`: the number of a token among the draft tokens; -1: it is none.
    """

    texts: list[Text]
    captured: Captured
    embedding: Tensor
    norm: Tensor
    rows: Tensor
    to_draft: Tensor
    num_steps: int
    eps: float

    def run(self, head: Head, picked: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the share of right drafts by step, and the accepted length without the first token."""
        longest = max(len(self.texts[i].tokens) for i in picked)
        ids = torch.zeros(len(picked), longest, dtype=torch.int64)
        hidden = torch.zeros(len(picked), longest, self.captured.hidden.shape[1], dtype=torch.bfloat16)
        last = torch.zeros(len(picked), longest, self.captured.last.shape[1], dtype=torch.bfloat16)
        greedy = torch.zeros_like(ids)
        in_answer = torch.zeros(len(picked), longest, dtype=torch.bool)
        for line, i in enumerate(picked):
            tokens, start = self.texts[i].tokens, self.captured.starts[i]
            span = slice(start, start + len(tokens))
            ids[line, : len(tokens)] = torch.tensor(tokens)
            hidden[line, : len(tokens)] = self.captured.hidden[span]
            last[line, : len(tokens)] = self.captured.last[span]
            greedy[line, : len(tokens)] = self.captured.greedy[span]
            in_answer[line, len(self.texts[i].prompt) : len(tokens) - 1] = True
        wide = last.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm).bfloat16()
        wanted = self.to_draft[greedy]
        with torch.autocast("cpu", torch.bfloat16):
            probabilities = (normed @ self.rows.T).float().softmax(-1)
            logits = head(self.embedding[ids].float(), hidden, self.num_steps)
        loss, right, so_far, accepted = torch.zeros(()), [], in_answer, torch.zeros(())
        for step, scores in enumerate(logits):
            counted = in_answer & (wanted >= 0)
            each = -(probabilities[counted] * scores[counted].float().log_softmax(-1)).sum(-1)
            loss = loss + DISCOUNT**step * each.mean()
            hits = scores.argmax(-1) == wanted
            right.append((hits & in_answer).sum() / in_answer.sum())
            so_far = so_far & hits
            accepted = accepted + so_far.sum()
            so_far = F.pad(so_far[:, :-1], (1, 0)) & in_answer  # slot j + 1 goes on where slot j was right
        return loss, torch.stack(right), accepted / in_answer.sum()


def train(
    args: argparse.Namespace,
    trainer: Trainer,
    head: Head,
    saved: dict[str, Any] | None,
    store: Callable[[dict[str, Any]], None],
    deadline: float,
) -> None:
    """Train until `deadline`, and print the accepted length on the texts that were held out.

    `store` gets the state of the training from time to time; `saved` is the last one of an earlier run, None: there was
    none.
    """
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    known, held_out = ([i for i, text in enumerate(trainer.texts) if text.held_out == flag] for flag in (False, True))
    held_out = [i for i in held_out if len(trainer.texts[i].answer) > 1] or known[:1]
    shuffler, step, begin = random.Random(time.time_ns()), 0, time.monotonic()
    if saved is not None:
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    first, reported = step, begin
    while time.monotonic() < deadline:
        done = (time.monotonic() - begin) / (deadline - begin)
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 20)
            group["lr"] = args.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        loss, right, accepted_now = trainer.run(head, shuffler.sample(known, min(BATCH_TEXTS, len(known))))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - reported > REPORT_S or step == first + 1:
            reported = time.monotonic()
            store({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            shares = ", ".join(f"{share:.2f}" for share in right.tolist())
            length = 1 + accepted_now.item()
            print(f"step {step}: loss {loss.item():.3f}, right {shares}, length {length:.2f}", flush=True)
    store({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    with torch.no_grad():
        parts = [trainer.run(head, held_out[i : i + BATCH_TEXTS])[1:] for i in range(0, len(held_out), BATCH_TEXTS)]
    shares = torch.stack([right for right, _ in parts]).mean(0).tolist()
    accepted = 1 + float(torch.stack([length for _, length in parts]).mean())
    print(f"held out: right {', '.join(f'{share:.3f}' for share in shares)}; accepted length {accepted:.2f} tokens")


def save(directory: Path, spec: ModelSpec, head: Head, draft_tokens: Tensor, taps: tuple[int, ...]) -> None:
    """Write the head's checkpoint."""
    heads, inner = head.heads, head.tensors()["midlayer.mlp.gate_proj.weight"].shape[0]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
        "vocab_size": spec.vocab_size, "draft_vocab_size": len(draft_tokens), "hidden_size": spec.hidden_size,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads, "head_dim": heads.head_dim, "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": heads.rope.theta, "max_position_embeddings": spec.max_positions, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = head.tensors()
    tensors["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
    tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, draft_tokens, True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages within the time given, and write the head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="the target: as --model-path of pdserve")
    add("--out", type=Path, help="directory of the head; below the cache directory when absent")
    add("--minutes", type=float, default=30.0, help="time of this run")
    add("--texts", type=int, default=1500, help="answers to train on")
    add("--max-tokens", type=int, default=224, help="longest answer in tokens")
    add("--draft-vocab", type=int, default=6144, help="tokens that the head knows: the most frequent ones of the texts")
    add("--num-steps", type=int, default=3, help="drafts in a row that are trained")
    add("--learning-rate", type=float, default=6e-4)
    add("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    begin, seconds = time.monotonic(), 60 * args.minutes
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    path = resolve_model_path(args.model)
    spec = read_model_spec(path)
    out = args.out or cache_root() / f"eagle3-{Path(args.model).name}"
    out.mkdir(parents=True, exist_ok=True)
    texts = write_texts(args, out / "texts.jsonl", begin + 0.35 * seconds)
    taps = tuple(layer - 1 for layer in (2, spec.num_layers // 2, spec.num_layers - 3))
    captured = capture(args.model, spec, taps, texts, out / "hidden.bin")
    print(f"{captured.starts[-1]} tokens captured after {time.monotonic() - begin:.0f} s", flush=True)
    weights = {name: tensor for file in weight_files(path) for name, tensor in load_file(file).items()}
    counts = Counter(token for text in texts for token in text.answer)
    saved = torch.load(out / "state.pt", weights_only=True) if (out / "state.pt").is_file() else None
    draft_tokens = torch.tensor(sorted(token for token, _ in counts.most_common(args.draft_vocab)))
    if saved is not None and not saved["step"]:
        saved = None
    if saved is not None:
        draft_tokens = saved["draft_tokens"]
    covered = sum(counts[token] for token in draft_tokens.tolist()) / sum(counts.values())
    print(f"{len(draft_tokens)} draft tokens are {covered:.1%} of the answers' tokens")
    to_draft = torch.full((spec.vocab_size,), -1).index_copy_(0, draft_tokens, torch.arange(len(draft_tokens)))
    embedding = weights["model.embed_tokens.weight"]
    rows = weights.get("lm_head.weight", embedding)[draft_tokens].bfloat16()
    head = Head(spec, weights, draft_tokens)
    norm = weights["model.norm.weight"].float()
    trainer = Trainer(texts, captured, embedding, norm, rows, to_draft, args.num_steps, spec.rms_norm_eps)

    def store(state: dict[str, Any]) -> None:
        torch.save(state | {"draft_tokens": draft_tokens}, out / "state.new")
        (out / "state.new").replace(out / "state.pt")

    train(args, trainer, head, saved, store, begin + 0.97 * seconds)
    save(out, spec, head, draft_tokens, taps)
    print(out)


if __name__ == "__main__":
    main()
