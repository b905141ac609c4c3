"""The contract of speculative drivers, as `subjects.contracts` has it for llama.h; part of the one table there.

Sources: common/speculative.h and common/speculative.cpp of the llama.cpp that llama-cpp-python 0.3.36 brings, and
tools/server/server-context.cpp for what a caller does.
"""

# ruff: noqa: E501 (quotes are kept in one piece)
from __future__ import annotations

from subjects.clauses import Clause, Contract, Says


def _c(id: str, text: str, source: str, says: Says) -> Clause:
    return Clause(id, text, source, says)


_SERVER = "tools/server/server-context.cpp does so"
_SILENT = "speculative.h says nothing about it"

DRIVER_CONTRACTS: tuple[Contract, ...] = (
    Contract(
        "propose",
        "common_speculative_draft, llama_memory_seq_rm on the draft",
        owes=(
            _c(
                "propose.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp common_speculative_get_draft_params(): GGML_ASSERT",
                "spec-source",
            ),
            _c("propose.once", "a sequence is asked once, and holds something", _SERVER, "spec-source"),
            _c("propose.answered", "no verification of the sequence is open", _SERVER, "spec-source"),
        ),
        gets=(
            _c(
                "propose.drafts",
                "the draft follows from the sequence's tokens and the next one",
                _SILENT,
                "spec-silent",
            ),
            _c("propose.after-cut", "after a cut that no call tells it of, the driver is right or says that it is not", _SILENT, "spec-silent"),
            _c("propose.own", "what other sequences do does not change it", _SILENT, "spec-silent"),
        ),
        forms=(),
    ),
    Contract(
        "verify",
        "llama_decode of the drafts, common_speculative_process, common_speculative_accept, llama_memory_seq_rm",
        owes=(
            _c(
                "verify.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp common_speculative_accept(): unchecked vector",
                "spec-source",
            ),
            _c(
                "verify.rows",
                "drafts of all sequences fit into n_batch, on recurrent memory into n_ubatch",
                "src/llama-context.cpp decode(): GGML_ASSERT(n_tokens_all <= cparams.n_batch)",
                "spec-source",
            ),
            _c(
                "verify.count",
                "one number of accepted drafts for each sequence, or none at all",
                _SERVER,
                "spec-source",
            ),
            _c(
                "verify.route",
                "recurrent memory without rollback takes another route than `cut`",
                _SERVER,
                "spec-source",
            ),
        ),
        gets=(
            _c("verify.greedy", "the target answers as in plain decoding", _SILENT, "spec-silent"),
            _c(
                "verify.rolled-back",
                "what was rejected does not matter any more, by whatever route",
                _SILENT,
                "spec-silent",
            ),
            _c(
                "verify.agree",
                "target and draft agree on positions, and the sequence is longer",
                _SILENT,
                "spec-silent",
            ),
        ),
        forms=(),
    ),
    Contract(
        "accept",
        "common_speculative_accept, llama_memory_seq_rm",
        owes=(
            _c(
                "accept.open",
                "a verification of the sequence is open",
                "speculative.cpp common_speculative_accept(): GGML_ASSERT(n_accepted == 0)",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "accept.row",
                "after n accepted drafts the next token is paired with the row of the n-th",
                'speculative.h: "informs the speculative context that n_accepted tokens were accepted by the target model"',
                "spec",
            ),
        ),
        forms=(),
    ),
    Contract(
        "checkpoint",
        "llama_state_seq_get_data_ext on target and draft, common_speculative_get_state",
        owes=(
            _c(
                "checkpoint.ids", "sequence ids lie in [0, n_seq), the sequence holds something", _SERVER, "spec-source"
            ),
            _c(
                "checkpoint.device",
                "one snapshot on the device a sequence",
                'llama.h: "invalidates all prior states gotten for that seq_id with this flag"',
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "checkpoint.driver",
                "what a driver keeps between calls is offered, or does not matter",
                _SILENT,
                "spec-silent",
            ),
        ),
        forms=(),
    ),
    Contract(
        "rewind",
        "llama_state_seq_set_data_ext on target and draft, common_speculative_set_state, llama_memory_seq_rm",
        owes=(
            _c("rewind.ids", "sequence ids lie in [0, n_seq)", _SERVER, "spec-source"),
            _c(
                "rewind.slot",
                "the slot holds a checkpoint, of this context where it is on the device",
                _SERVER,
                "spec-source",
            ),
            _c(
                "rewind.prefix",
                "what a partial checkpoint leaves out still holds its tokens",
                "llama.h: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "rewind.state",
                "the sequence drafts as it did when it was saved",
                'speculative.h: "(optional) get/set internal state"',
                "spec",
            ),
        ),
        forms=(),
    ),
    Contract(
        "mangle",
        "common_speculative_set_state of bytes that get_state never gave",
        owes=(_c("mangle.slot", "the slot holds a checkpoint", _SERVER, "spec-source"),),
        gets=(
            _c("mangle.refused", "nothing changes", _SILENT, "spec-silent"),
            _c("mangle.told", "the caller can see it", _SILENT, "spec-silent"),
        ),
        forms=(),
    ),
    Contract(
        "begin",
        "common_speculative_begin",
        owes=(
            _c(
                "begin.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp: GGML_ASSERT(seq_id < (llama_seq_id) n_seq)",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "begin.fresh",
                "a new conversation does not depend on the one before",
                'speculative.h: "optionally call once at the beginning of a new generation"',
                "spec-silent",
            ),
        ),
        forms=(),
    ),
)
