// draft-eagle3: a state that is saved between process() and accept() is restored without the rows that accept() chooses among.
//
// get_state() gives pending_g_last and pending_pos_last; accept(n) takes row n of verify_g and counts from verify_pos_first, which
// are those of the last batch that was processed, whatever was restored since. Where that batch began at the same position, as
// here, the next draft is silently made from its row; where it began elsewhere, the position is wrong too and drafting fails
// (measured: with a batch that began two positions later, "starting position of Y = 11", no tokens). Compile line: plain.h.
//
// qwen35 + eagle3-qwen35, llama-cpp-python 0.3.36:
//     WRONG: drafted [38 1 8] after the restore, [38 1 8] before; max abs error of the draft logits 1.8
// control, nothing between saving and restoring:
//     right: drafted [38 1 8] after the restore, [38 1 8] before; max abs error of the draft logits 0
#include "plain.h"

// accept one token of the verified draft, then draft behind it
static drafted accept_and_draft(speculation & s) {
    common_speculative_accept(s.spec, 0, 1);
    s.cut_both(0, 10);
    const drafted d = s.draft(0, 10, 7);
    s.cut_draft(0, 10);
    return d;
}

static int program(bool control) {
    speculation s({ COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 });
    s.decode(0, 0, text(8));
    llama_tokens batch = { 50 };
    for (llama_token t : s.draft(0, 8, 50).tokens) {
        batch.push_back(t);
    }
    s.cut_draft(0, 8);
    s.decode(0, 8, batch, true); // verified, not yet accepted

    const auto target = save(s.tgt, 0);
    const auto draft  = save(s.dft, 0);
    std::vector<uint8_t> driver;
    must(common_speculative_get_state(s.spec, 0, driver), "the driver offers no state");

    const drafted before = accept_and_draft(s);
    if (!control) {
        // another conversation in the same sequence, as long as this one
        llama_memory_seq_rm(llama_get_memory(s.tgt), 0, -1, -1);
        llama_memory_seq_rm(llama_get_memory(s.dft), 0, -1, -1);
        s.decode(0, 0, text(8, 1));
        s.decode(0, 8, text(4, 2), true);
    }
    restore(s.tgt, 0, target);
    restore(s.dft, 0, draft);
    common_speculative_set_state(s.spec, 0, driver);
    return judge("after the restore", accept_and_draft(s), "before", before);
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
