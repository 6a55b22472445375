from pathlib import Path

import msgspec

from cluster.loading import LoadState, ProgressFile, read_progress
from replicas.api import ModelCard
from replicas.errors import ModelError

CARD = ModelCard(
    name="m",
    fingerprint="f",
    vocab_size=10,
    max_model_len=8,
    eos_token_ids=(),
    num_blocks=1,
    block_size=16,
    max_num_seqs=1,
    replica_epoch=1,
)


def test_the_state_of_replicas_that_are_not_ready_comes_first(tmp_path: Path) -> None:
    ProgressFile.open(str(tmp_path), "a").finish(CARD, ("fast",), {"loading": 2.0})
    ProgressFile.open(str(tmp_path), "b").note("loading weights", 0.5)
    ready = LoadState(doing="ready", share=1.0, card=CARD, facts=("fast",), phases={"loading": 2.0})
    assert read_progress(tmp_path) == [LoadState(doing="loading weights", share=0.5), ready]


def test_an_error_that_the_user_can_mend_is_told_as_it_is(tmp_path: Path) -> None:
    ProgressFile.open(str(tmp_path), "a").fail(ModelError("model x:\n no weights"))
    assert read_progress(tmp_path) == [LoadState(error="model x: no weights", is_users=True)]


def test_another_error_is_told_with_its_type(tmp_path: Path) -> None:
    ProgressFile.open(str(tmp_path), "a").fail(ZeroDivisionError("division by zero"))
    assert read_progress(tmp_path) == [LoadState(error="ZeroDivisionError: division by zero")]


def test_no_folder_means_no_file(tmp_path: Path) -> None:
    ProgressFile.open(None, "a").note("loading", None)
    assert list(tmp_path.iterdir()) == []


def test_a_state_survives_the_file(tmp_path: Path) -> None:
    state = LoadState(doing="x", share=None, card=CARD)
    assert msgspec.json.decode(msgspec.json.encode(state), type=LoadState) == state
    assert read_progress(tmp_path) == []
