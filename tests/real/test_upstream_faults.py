"""What redraft blames llama.cpp for, reproduced in plain llama_cpp calls and explained from its source.

Each row of the table is a script in `plain/` that uses nothing of redraft but its generated models. A row says what the
pinned release does and whose fault that is:

- "fault": llama.h promises otherwise, or is silent and no reading of it allows what happens;
- "design": it reads like a fault of llama.h's letter, but upstream chose it, so it must not be reported as a bug;
- "misuse": llama.h says that the caller must not;
- "sound": a suspicion that was not confirmed, or a memory that gets right what others get wrong.

Line numbers are those of ggml-org/llama.cpp 0c1e57098, the one in llama-cpp-python 0.3.36.
"""

import importlib.metadata
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

PLAIN = Path(__file__).with_name("plain")
PINNED = "0.3.36"

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("llama-cpp-python") != PINNED, reason=f"the table describes llama-cpp-python {PINNED}"
)


@dataclass(frozen=True)
class Row:
    script: str
    recipes: tuple[str, ...]
    shows: Literal["wrong", "abort", "right"]
    whose: Literal["fault", "design", "misuse", "sound"]
    verdict: str
    options: tuple[str, ...] = ()
    says: str = ""
    """what must be in the script's line, or in the message of the abort"""

    @property
    def name(self) -> str:
        return " ".join((self.script, *self.options))


ROLLBACK = ("qwen35", "lfm2", "nemotron_h", "qwen4exp")

TABLE = (
    Row(
        "ubatch-rollback",
        ("qwen35",),
        "abort",
        "fault",
        "llama_batch_allocr::split_equal asserts n_ubatch > n_rs_seq + 1 at the first decode; "
        "llama_init_from_model, which clamps and refuses other parameters, accepts the pair and llama.h does not "
        "mention it.",
        says="n_ubatch > n_keep_tail",
    ),
    Row(
        "device-corrupt",
        ("llama", "qwen35", "mamba2"),
        "abort",
        "fault",
        "llama_context::state_seq_set_data reads magic and id of an ON_DEVICE blob before its try block, so fewer "
        "than eight bytes throw through the C interface; llama.h: zero means failed to load.",
        says="unexpectedly reached end of buffer",
    ),
    Row(
        "device-corrupt",
        ("llama",),
        "abort",
        "fault",
        "As above: the exception for a wrong magic is thrown outside the try block, in a function of a C interface.",
        options=("--magic",),
        says="wrong sequence state magic",
    ),
    Row(
        "index-pos",
        ("qwen4exp",),
        "abort",
        "fault",
        "llama_memory_hybrid_idx::state_read takes any positions for the indexer's cells, and the next decode asserts "
        "that they lie in the window; llama.h: zero means failed to load.",
        says="cell position runs past the cell window",
    ),
    Row(
        "cp-then-rm",
        ("deepseek4",),
        "wrong",
        "fault",
        "llama_dsv4_comp_state::seq_cp queues the copy until the next decode, and seq_rm of the source clears the rows "
        "before; llama.h says of seq_cp that it copies.",
    ),
    Row(
        "stuck-cell",
        ("llama",),
        "wrong",
        "fault",
        "llama_kv_cache::state_read_meta takes any position, and seq_rm(-1, -1), with which every later restore "
        "begins, removes [0, 2147483647): the cell stays. llama.h: zero means failed to load.",
        says="positions (-5, 7)",
    ),
    Row(
        "stuck-cell",
        ("llama",),
        "wrong",
        "fault",
        "As above, at the other end.",
        options=("--largest",),
        says="positions (0, 2147483647)",
    ),
    Row(
        "recurrent-cells",
        ("mamba2", "qwen35", "rwkv7"),
        "abort",
        "fault",
        "llama_memory_recurrent::state_read_meta asserts that find_slot() made as many cells as the blob claims, but "
        "that makes one for a sequence; llama.h: zero means failed to load.",
        says="cells[head + cell_count - 1].pos == ubatch.pos[cell_count - 1]",
    ),
    Row(
        "device-foreign",
        ("llama", "qwen35"),
        "abort",
        "fault",
        "llama_context::state_seq_set_data asserts that the id in the blob has a device store; llama.h says that a "
        "new save invalidates older handles, not that a stale handle ends the process instead of returning 0.",
        says="mem_storage.find(seq_id_read)",
    ),
    Row(
        "device-older",
        ("llama", "gemma3", "qwen35", "lfm2-swa"),
        "abort",
        "misuse",
        "llama.h (LLAMA_STATE_SEQ_FLAGS_ON_DEVICE): a save invalidates all prior states of that sequence, so "
        "restoring one is the caller's fault; that ~llama_io_read_device aborts rather than refuses is a matter of "
        "hardening.",
        says="memory buffer mismatch",
    ),
    Row(
        "device-older",
        ("mamba2",),
        "wrong",
        "misuse",
        "As above; states of equal size can not be told apart by llama_io_read_device, so the newer one is restored.",
    ),
    Row(
        "device-older",
        ("lfm2-swa",),
        "wrong",
        "misuse",
        "As above, once the window is full at both saves and the sizes are equal.",
        options=("--long",),
    ),
    Row(
        "stale-rollback",
        ROLLBACK,
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_rm checks only the depth against n_rs_seq, but single-token decodes write "
        "plane 0 only, so plane d is older than it claims; llama.h: seq_rm returns false if a partial sequence "
        "cannot be removed.",
        says="seq_rm returned True",
    ),
    Row(
        "stale-rollback",
        ROLLBACK,
        "wrong",
        "fault",
        "The plane for the state before a batch is never written, yet undoing the whole batch is answered with true.",
        options=("--batch",),
        says="seq_rm returned True",
    ),
    Row(
        "stale-rollback",
        ("deepseek4",),
        "wrong",
        "fault",
        "llama_kv_cache_dsv4::seq_rm checks only the depth too; dsv4_build_comp_plan fills planes beyond the last "
        "micro-batch with the state before it. Wrong where a multiple of four lies behind the position of the cut and "
        "before the first of the last batch (a sweep found no other place).",
        options=("--at", "19"),
        says="seq_rm returned True",
    ),
    Row(
        "stale-rollback",
        ("deepseek4",),
        "right",
        "sound",
        "No block completed: rows that are decoded again overwrite the stale ones. (Luck, not a promise.)",
    ),
    Row(
        "stale-rollback",
        ("deepseek4",),
        "right",
        "sound",
        "Undoing a whole batch was exact on llama_kv_cache_dsv4 at every place tried.",
        options=("--batch", "--at", "19"),
    ),
    Row(
        "stale-rollback",
        (*ROLLBACK, "deepseek4"),
        "wrong",
        "fault",
        "A saved state has one plane, and a restore does not note that the others are missing: seq_rm after it checks "
        "only the depth and hands out planes of nobody.",
        options=("--restored",),
        says="seq_rm returned True",
    ),
    Row(
        "keep-split",
        ("llama", "gemma3", "qwen35", "lfm2-swa"),
        "wrong",
        "fault",
        "llama_kv_cache::seq_keep visits the cells of the kept sequence's stream only; llama.h: removes all tokens "
        "that do not belong to the specified sequence.",
        says="after seq_keep(0) sequence 1 has positions (0,",
    ),
    Row(
        "keep-split",
        ("mamba2", "deepseek4"),
        "right",
        "sound",
        "llama_memory_recurrent has no streams; llama_kv_cache_dsv4::seq_keep removes the others one by one.",
    ),
    Row(
        "rm-any-recurrent",
        ("mamba2", "rwkv7", "qwen35", "lfm2"),
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_rm compares (uint32_t) seq_id with n_seq_max, so -1 is 'invalid' before the "
        "code for it is reached; llama.h: seq_id < 0 matches any sequence, removing a whole sequence never fails.",
        says="seq_rm returned [False]",
    ),
    Row("rm-any-recurrent", ("llama", "deepseek4"), "right", "sound", "llama_kv_cache::seq_rm handles -1."),
    Row(
        "middle-true",
        ("mamba2", "qwen35", "lfm2", "granitehybrid"),
        "wrong",
        "design",
        "Upstream PR 17009 made a removal that spares the last token a no-op of the recurrent part, so that context "
        "shift works on hybrids; it contradicts llama.h's letter (false if a partial sequence cannot be removed), "
        "on purpose.",
        says="seq_rm returned True",
    ),
    Row("middle-true", ("llama", "deepseek4"), "right", "sound", "Attention removes; llama_kv_cache_dsv4 refuses."),
    Row(
        "cp-pending-rollback",
        ROLLBACK,
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_cp shares the cell but not rs_idx, so the copy reads plane 0, the state before "
        "the rollback; llama.h: copies all tokens that belong to the sequence.",
    ),
    Row(
        "cp-pending-rollback",
        ("deepseek4",),
        "wrong",
        "fault",
        "llama_kv_cache_dsv4::seq_cp sets rs_idx of the copy to 0, where it would have to be the source's.",
        options=("--at", "19"),
    ),
    Row("cp-pending-rollback", ("deepseek4",), "right", "sound", "No block of four was completed by what was cut."),
    Row(
        "cp-onto-pending",
        ROLLBACK,
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_cp does not reset rs_idx of the destination, so its old rollback is applied to "
        "the copy.",
    ),
    Row("cp-onto-pending", ("deepseek4",), "right", "sound", "llama_kv_cache_dsv4::seq_cp resets it."),
    Row(
        "keep-pending",
        ("qwen35", "lfm2", "nemotron_h"),
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_keep removes the sequence but leaves its rs_idx, so the next text starts from "
        "a plane that was not zeroed instead of from an empty state.",
        says="positions (-1, -1) before",
    ),
    Row(
        "keep-pending",
        ("qwen35", "lfm2", "nemotron_h"),
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_rm resets rs_idx for the open range only; seq_rm(s, 0, n) that names every "
        "position empties the sequence too, and leaves it.",
        options=("--range",),
        says="positions (-1, -1) before",
    ),
    Row(
        "keep-pending",
        ("qwen35", "lfm2"),
        "right",
        "sound",
        "llama_memory_recurrent::clear resets rs_idx.",
        options=("--clear",),
    ),
    Row(
        "shared-rollback",
        ("qwen35", "lfm2", "nemotron_h"),
        "wrong",
        "fault",
        "llama_memory_recurrent::seq_rm lowers the position of a cell that other sequences share, so a sequence "
        "nobody touched reports fewer positions, and its next token is refused as inconsistent (not with M-RoPE).",
        says="positions of sequence 1 (15, 15) -> (13, 13)",
    ),
    Row("shared-rollback", ("deepseek4", "mamba2"), "right", "sound", "No shared cells, or no rollback."),
    Row(
        "moved-rollback",
        ROLLBACK,
        "wrong",
        "fault",
        "llama_memory_recurrent::find_slot swaps cells to make a batch's sequences neighbours, and build_rs carries "
        "plane 0 of the moved ones only: their rollback planes stay behind, and seq_rm hands out another "
        "sequence's.",
        says="seq_rm(2, 14, -1) returned True",
    ),
    Row("moved-rollback", ("deepseek4", "mamba2"), "right", "sound", "Cells do not move, or no rollback."),
    Row(
        "save-all-pending-shared",
        ROLLBACK,
        "abort",
        "fault",
        "llama_memory_recurrent::state_write aborts when sequences of one cell have different rs_idx, which seq_rm "
        "followed by seq_cp makes; even llama_state_get_size ends the process.",
        says="cannot write shared recurrent state with different rollback indices",
    ),
    Row("save-all-pending-shared", ("deepseek4",), "right", "sound", "llama_kv_cache_dsv4 does not share cells."),
    Row(
        "cp-then-save",
        ("llama", "gemma3", "qwen35", "lfm2-swa", "deepseek4"),
        "wrong",
        "fault",
        "llama_kv_cache::seq_cp across streams only notes the copy (sc_info) for the next "
        "llama_context::memory_update, which decode calls and state_seq_get_data does not: it saves cells whose "
        "data is not there yet.",
    ),
    Row("cp-then-save", ("mamba2",), "right", "sound", "Recurrent cells are shared, not copied."),
    Row(
        "cp-then-save-all",
        ("llama", "gemma3", "qwen35", "lfm2-swa", "deepseek4"),
        "wrong",
        "fault",
        "As cp-then-save, by llama_context::state_get_data.",
    ),
    Row("cp-then-save-all", ("mamba2",), "right", "sound", "Recurrent cells are shared, not copied."),
    Row(
        "cp-then-restore",
        ("llama", "gemma3", "qwen35", "lfm2-swa", "deepseek4"),
        "wrong",
        "fault",
        "llama_kv_cache::state_read does not flush or drop a noted stream copy into its target, so the next decode "
        "overwrites what was restored although the restore said it succeeded.",
    ),
    Row(
        "cp-then-restore",
        ("llama", "gemma3", "qwen35", "lfm2-swa", "deepseek4"),
        "wrong",
        "fault",
        "The same late copy, when the source is restored first: the copy takes the restored data under the old "
        "positions.",
        options=("--source",),
    ),
    Row("cp-then-restore", ("mamba2",), "right", "sound", "Recurrent cells are shared, not copied."),
    Row(
        "add-then-save",
        ("llama", "gemma3", "granitehybrid", "falcon-h1"),
        "wrong",
        "fault",
        "llama_kv_cache::seq_add changes positions at once and rotates the keys at the next memory_update; "
        "state_write saves new positions with unrotated keys and not the shift that is due, so it is lost.",
    ),
    Row("add-then-save", ("jamba", "mamba2"), "right", "sound", "No rotated keys."),
    Row(
        "abort-recurrent",
        ("mamba2", "rwkv7", "qwen35", "lfm2", "deepseek4"),
        "wrong",
        "fault",
        "llama_context::decode removes an aborted ubatch with memory->seq_rm and ignores that recurrent memory "
        "refuses; llama.h: only processed ubatches remain, query the positions - and these count the aborted one.",
        says="decode returned 2, 48 positions left",
    ),
    Row(
        "abort-recurrent",
        ("qwen35", "lfm2", "deepseek4"),
        "wrong",
        "fault",
        "An aborted ubatch of at most n_rs_seq tokens is 'rolled back' over planes it never wrote: positions are "
        "right, the state is of an earlier token.",
        options=("--short",),
        says="decode returned 2, 16 positions left",
    ),
    Row(
        "abort-recurrent",
        ("mamba2",),
        "wrong",
        "fault",
        "As the first form: the removal is refused and the positions count tokens that were not computed.",
        options=("--short",),
        says="decode returned 2, 19 positions left",
    ),
    Row("abort-recurrent", ("llama", "gemma3"), "right", "sound", "Attention cells of the aborted ubatch are removed."),
    Row(
        "truncated-half",
        ("gemma3", "qwen35", "lfm2-swa", "deepseek4"),
        "wrong",
        "fault",
        "state_read of combined memories (iswa, hybrid_iswa, dsv4; hybrid when its attention part fails) throws "
        "between the parts and undoes nothing of the other; llama.h: zero, and all positions in [pos_min, pos_max] "
        "are present - they are not.",
        says="restore returned 0",
    ),
    Row(
        "truncated-half",
        ("gemma3", "qwen35"),
        "wrong",
        "fault",
        "The same on the device route.",
        options=("--device",),
        says="restore returned 0",
    ),
    Row(
        "truncated-half",
        ("gemma3", "lfm2-swa"),
        "wrong",
        "fault",
        "The same, cut in the later part (for gemma3: the memory says empty, but the full-attention cache has cells).",
        options=("--cut", "70"),
        says="restore returned 0",
    ),
    Row(
        "truncated-half",
        ("qwen35",),
        "right",
        "sound",
        "llama_memory_hybrid::state_read undoes the attention part when the recurrent part fails.",
        options=("--cut", "70"),
        says="restore returned 0",
    ),
    Row("truncated-half", ("llama", "mamba2"), "right", "sound", "Single memories end up empty.", says="returned 0"),
    Row(
        "shift-abort",
        ("lfm2-swa",),
        "abort",
        "fault",
        "can_shift says true, but llama_kv_cache::update builds a shift graph for a cache without layers too (lfm2 "
        "with a window puts all attention in the SWA half): its input has no buffer, and set_input_k_shift asserts.",
        says="GGML_ASSERT(buffer)",
    ),
    Row(
        "shift-abort",
        ("lfm2-swa",),
        "abort",
        "fault",
        "The same without a removal: seq_add of the whole sequence.",
        options=("--whole",),
        says="GGML_ASSERT(buffer)",
    ),
    Row(
        "shift-abort",
        ("gemma3", "granitehybrid", "falcon-h1", "jamba"),
        "right",
        "sound",
        "Both halves have layers, or there is one cache.",
        options=("--whole",),
    ),
    Row(
        "empty-restore",
        ("llama", "gemma3"),
        "wrong",
        "fault",
        "llama_kv_cache::state_read_sinfo skips a stream without cells, and state_read_meta, which empties the target, "
        "is never reached; llama.h: copies the sequence data into the sequence, positive is ok - it has other tokens.",
        says="positions (0, 4)",
    ),
    Row(
        "empty-restore",
        ("qwen35", "lfm2", "granitehybrid"),
        "wrong",
        "fault",
        "As above, and llama_memory_recurrent::state_read does empty its part: attention has tokens that the recurrent "
        "state does not know, and first and last position contradict each other.",
        says="positions (0, -1)",
    ),
    Row(
        "empty-restore",
        ("deepseek4",),
        "wrong",
        "fault",
        "As above for its caches; the compressor states are replaced.",
        says="positions (4, 4)",
    ),
    Row("empty-restore", ("mamba2", "rwkv7"), "right", "sound", "llama_memory_recurrent empties the target."),
    Row(
        "window-purge",
        ("gemma3", "lfm2-swa"),
        "wrong",
        "fault",
        "llama_kv_cache::prepare tries all micro-batches and puts back the cells they took, but not those that "
        "apply_ubatch purged with them (positions below an overwritten one, anywhere in the stream): micro-batches "
        "before it are computed without keys inside their window.",
    ),
    Row("window-purge", ("gemma3",), "wrong", "fault", "swa_full sizes the cache, not the reuse.", options=("--full",)),
    Row(
        "window-purge",
        ("gemma3",),
        "wrong",
        "fault",
        "One sequence is enough once cells are out of order of positions, which takes two removals in the middle.",
        options=("--alone",),
    ),
    Row("window-purge", ("llama",), "right", "sound", "Without a window no cell is overwritten."),
    Row(
        "file-cut",
        ("mamba2", "qwen35"),
        "abort",
        "fault",
        "llama_file::read_raw_unsafe reads what is left and says nothing when less is left than asked (the end of a "
        "file is for it padding of direct I/O), so the readers take old buffers for content until state_seq_load_file "
        "asserts that it read no more than there was; llama.h's loaders answer 0.",
        says="nread <= state_size",
    ),
    Row(
        "file-cut",
        ("llama", "gemma3"),
        "abort",
        "fault",
        "As above. (With several streams the missing last cell count is read from uninitialised memory, so what "
        "happens there is chance.)",
        options=("--unified",),
        says="nread <= state_size",
    ),
    Row(
        "device-regrow",
        ("llama", "gemma3", "qwen35", "lfm2-swa"),
        "abort",
        "fault",
        "~llama_io_write_device keeps its buffer when the sum of bytes is equal, but every piece is padded to the "
        "alignment: with V transposed each row of each range is a piece. llama.h allows the second save.",
        says="not enough space in the buffer",
    ),
    Row(
        "device-regrow",
        ("gemma3", "lfm2-swa"),
        "abort",
        "fault",
        "The same without an edit: a window that goes round the end of its cache is saved in two pieces.",
        options=("--wrap",),
        says="not enough space in the buffer",
    ),
    Row(
        "device-regrow",
        ("llama", "gemma3"),
        "right",
        "sound",
        "V is not transposed, and rows here are multiples of the alignment.",
        options=("--flash",),
    ),
    Row(
        "shift-bf16",
        ("llama", "llama-h64"),
        "abort",
        "fault",
        "llama_kv_cache::build_rope_shift casts quantised K to F32 but rotates BF16 in place, which "
        "ggml_compute_forward_rope does not have (F16, F32); llama_kv_cache::get_can_shift does not look at the type.",
        says="fatal error",
    ),
    Row("shift-bf16", ("llama-h64",), "abort", "fault", "The same with flash attention.", ("--flash",), "fatal error"),
    Row("shift-bf16", ("llama-h64",), "right", "sound", "Quantised K goes through F32.", ("--flash", "--q8_0")),
    Row(
        "hidden-rows",
        ("deepseek4", "qwen4exp"),
        "abort",
        "fault",
        "load_arch_hparams sets n_embd_out_impl to streams * n_embd for the NextN rows, but t_embd is the mixed row of "
        "n_embd; llama_context::decode reads n_embd_out of each. Nothing refuses params.embeddings.",
        says="tensor read out of bounds",
    ),
    Row("hidden-rows", ("llama", "qwen35", "mamba2"), "right", "sound", "Rows are as wide as the model says."),
    Row(
        "abort-shift",
        ("llama", "gemma3"),
        "wrong",
        "fault",
        "llama_kv_cache::update returns without reset_shift when the rotation is aborted, although layers are rotated "
        "in place by then, and llama_kv_cache_context::apply drops the answer: the next decode rotates them again.",
        says="decode of the other returned 2",
    ),
    Row(
        "abort-shift",
        ("llama", "gemma3"),
        "wrong",
        "fault",
        "As above; a callback that fires during the rotation only is not even noticed by llama_decode.",
        options=("--once",),
        says="decode of the other returned 0",
    ),
    Row(
        "context-truncated",
        ("llama",),
        "wrong",
        "fault",
        "llama_kv_cache::state_read_sinfo catches what state_read_data throws, not what state_read_meta does: streams "
        "read before keep their cells while io.discard() drops their data, and the one being read has some.",
        says="restore returned 0, positions [(0, 7), (0, 5)]",
    ),
    Row(
        "context-truncated",
        ("gemma3",),
        "wrong",
        "fault",
        "As truncated-half: llama_kv_cache_iswa::state_read does not undo the first cache when the second fails.",
        options=("--cut", "90"),
        says="restore returned 0",
    ),
    Row(
        "context-truncated",
        ("qwen35",),
        "wrong",
        "fault",
        "As truncated-half: llama_memory_hybrid::state_read undoes nothing when attention fails, and the recurrent "
        "part is still the old one.",
        options=("--cut", "20"),
        says="restore returned 0",
    ),
    Row(
        "context-truncated",
        ("llama", "qwen35", "mamba2"),
        "right",
        "sound",
        "Cut within tensor data: everything is emptied.",
        options=("--cut", "90"),
        says="restore returned 0",
    ),
    Row(
        "context-truncated",
        ("llama", "mamba2", "qwen35"),
        "wrong",
        "fault",
        "llama_context::state_load_file compares the sizes after state_read_data has replaced the memory, the end of "
        "it by whatever was in the buffer (see file-cut), and leaves it so; llama.h is silent about a load that says "
        "false.",
        options=("--file", "--cut", "90"),
        says="restore returned False",
    ),
    Row(
        "context-truncated",
        ("llama", "mamba2"),
        "wrong",
        "fault",
        "The same; mild, as what was loaded is whole. (state_seq_load_file takes a longer file.)",
        options=("--file", "--longer"),
        says="restore returned False",
    ),
    Row(
        "unified-mixes",
        ("qwen4exp",),
        "right",
        "sound",
        "False alarm: with other sequences in a unified cache qwen4exp's logits are 0.2 from a solo run's, but not "
        "one bit depends on what the others say; the selection depends on where cells lie (cause not traced). "
        "Compare at equal placement.",
    ),
)

CASES = [pytest.param(row, recipe, id=f"{row.name}-{recipe}") for row in TABLE for recipe in row.recipes]


def call(script: str, recipe: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PLAIN / f"{script}.py"), recipe, *options]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("row", "recipe"), CASES)
def test_the_pinned_release_does_what_the_table_says(row: Row, recipe: str) -> None:
    done = call(row.script, recipe, *row.options)
    everything = done.stdout + done.stderr
    if row.shows == "abort":
        assert done.returncode == -signal.SIGABRT, everything
        assert row.says in done.stderr
    else:
        assert done.returncode == {"right": 0, "wrong": 1}[row.shows], everything
        assert done.stdout.startswith({"right": "right:", "wrong": "WRONG:"}[row.shows]), everything
        assert row.says in done.stdout


@pytest.mark.parametrize(("row", "recipe"), [case for case in CASES if case.values[0].shows != "right"])
def test_without_the_trigger_the_same_calls_are_right(row: Row, recipe: str) -> None:
    done = call(row.script, recipe, *row.options, "--control")
    assert done.returncode == 0 and done.stdout.startswith("right:"), done.stdout + done.stderr


def test_every_script_is_in_the_table() -> None:
    assert {path.stem for path in PLAIN.glob("*.py")} - {"_plain"} == {row.script for row in TABLE}
