"""What training sees of a draft is what drafting will do, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forerun.models.draft_head import DraftHead
from forerun.train import students
from forerun.train.head_loss import SharedHead
from forerun.train.objective import roll_out
from forerun.train.students import CausalStudent, FeatureStudent, ParallelStudent, unrolled_mask
from support.tiny import draft_of, tiny_model

DEPTH, ROWS, LENGTH = 4, 2, 11


def head_of(family: str, num_blocks: int = 0) -> DraftHead:
    torch.manual_seed(3)
    head = DraftHead.for_target(tiny_model(family), num_layers=2, num_blocks=num_blocks).eval()
    for weight in head.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.3)  # timid weights would make all estimates alike
    return head


def texts_of(family: str) -> tuple[Tensor, Tensor]:
    model = tiny_model(family)
    tokens = torch.randint(1, 97, (ROWS, LENGTH))
    with torch.no_grad():
        return tokens, model.base_model(input_ids=tokens).last_hidden_state


@torch.no_grad()
def drafted(head: DraftHead, embedding: nn.Module, tokens: Tensor, features: Tensor, start: int, depth: int) -> Tensor:
    """The oracle: a draft that begins when features 0 .. start - 1 are known, one token a step, without any cache."""
    made: list[Tensor] = []
    given = features[:, :start]
    for _ in range(depth):
        pairs = head.inputs(embedding(tokens[:, 1 : given.shape[1] + 1]), given)
        out = head.body(inputs_embeds=pairs, use_cache=False).last_hidden_state[:, -1]
        made.append(out)
        given = torch.cat((given, out[:, None]), dim=1)
    return torch.stack(made)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_unrolled_passes_are_drafts_step_by_step(family: str) -> None:
    head, (tokens, features) = head_of(family), texts_of(family)
    embedding = tiny_model(family).get_input_embeddings()
    with torch.no_grad():
        made = FeatureStudent(head, embedding, DEPTH)(tokens, features)
    assert made.shape == (DEPTH, ROWS, LENGTH, features.shape[-1])
    for start in range(1, LENGTH - DEPTH + 1):
        want = drafted(head, embedding, tokens, features, start, DEPTH)
        got = torch.stack([made[s, :, start + s] for s in range(DEPTH)])
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_mask_that_lets_later_passes_see_true_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    head, (tokens, features) = head_of("llama"), texts_of("llama")
    embedding = tiny_model("llama").get_input_embeddings()

    def cheating(s: int, positions: Tensor) -> Tensor:
        mask = unrolled_mask(s, positions)
        mask[:, : len(positions)] = positions[None, :] <= positions[:, None]
        return mask

    monkeypatch.setattr(students, "unrolled_mask", cheating)
    with torch.no_grad():
        made = FeatureStudent(head, embedding, DEPTH)(tokens, features)
    want = drafted(head, embedding, tokens, features, 4, DEPTH)
    torch.testing.assert_close(made[0, :, 4], want[0], atol=2e-5, rtol=1e-4)
    assert (made[1, :, 5] - want[1]).abs().max() > 1e-2


def test_later_tokens_do_not_reach_back() -> None:
    head, (tokens, features) = head_of("llama"), texts_of("llama")
    student = FeatureStudent(head, tiny_model("llama").get_input_embeddings(), DEPTH)
    changed, other = tokens.clone(), features.clone()
    changed[:, 7:] = 1
    other[:, 7:] = 0
    with torch.no_grad():
        torch.testing.assert_close(student(changed, other)[:, :, :7], student(tokens, features)[:, :, :7])


def test_parallel_heads_read_features_as_far_back_as_their_number() -> None:
    head, (tokens, features) = head_of("llama", num_blocks=3), texts_of("llama")
    embedding = tiny_model("llama").get_input_embeddings()
    with torch.no_grad():
        made = ParallelStudent(head, embedding)(tokens, features)
        for start in range(1, LENGTH - 3):
            trunk = drafted(head, embedding, tokens, features, start, 1)[0]
            for j in range(3):
                torch.testing.assert_close(made[j, :, start + j], head.block(j, trunk), atol=2e-5, rtol=1e-4)


def test_a_causal_student_is_its_model() -> None:
    model, (tokens, _) = draft_of(tiny_model("llama")), texts_of("llama")
    with torch.no_grad():
        made = CausalStudent(model, None)(tokens, None)[0]
        torch.testing.assert_close(model.get_output_embeddings()(made), model(tokens).logits)


def test_gradients_flow_through_all_passes() -> None:
    head, (tokens, features) = head_of("llama"), texts_of("llama")
    student = FeatureStudent(head, tiny_model("llama").get_input_embeddings(), 3)
    student(tokens, features)[2, :, 6:].square().sum().backward()
    missing = [name for name, weight in student.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not missing


@pytest.mark.parametrize("kind", ["feature", "causal"])
def test_rollouts_are_drafts_of_the_draft_itself(kind: str) -> None:
    """A law so sharp that sampling is greedy: the rollout must be the greedy draft."""
    target, (tokens, features) = tiny_model("llama"), texts_of("llama")
    head = SharedHead(target.get_output_embeddings(), torch.arange(0, 97, 2))
    head.narrow = head.narrow * 200
    cuts = torch.tensor([4, 8])
    embedding = target.get_input_embeddings()
    student = (
        FeatureStudent(head_of("llama"), embedding, 2) if kind == "feature" else CausalStudent(draft_of(target), None)
    )
    given = features if kind == "feature" else None
    made = roll_out(student, head, tokens, given, cuts, 3, torch.Generator().manual_seed(0))
    for row, cut in enumerate(cuts.tolist()):
        text = tokens[row : row + 1, : cut + 1]
        known = features[row : row + 1, :cut]
        for _ in range(min(3, LENGTH - 1 - cut)):
            with torch.no_grad():
                if isinstance(student, FeatureStudent):
                    pairs = student.head.inputs(embedding(text[:, 1:]), known)
                    hidden = student.head.body(inputs_embeds=pairs, use_cache=False).last_hidden_state[:, -1]
                else:
                    hidden = student(text, None)[0, :, -1]
            known = torch.cat((known, hidden[:, None]), dim=1)
            token = head.name((hidden @ head.narrow.T).argmax(dim=-1))
            text = torch.cat((text, token[:, None]), dim=1)
        assert made[row, : text.shape[1]].tolist() == text[0].tolist()
        assert made[row, text.shape[1] :].tolist() == tokens[row, text.shape[1] :].tolist()
