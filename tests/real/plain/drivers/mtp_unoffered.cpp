// draft-mtp: a sequence is saved in both memories and restored, and drafts from the hidden row of another position.
//
// common_speculative_impl_draft_mtp::pending_h, the row that the next token is paired with, is part of what a draft is made
// from, but neither memory holds it and get_state/set_state are not there for this driver: after other work on the same
// sequence a restore leaves that work's last row in place. Compile line: plain.h.
//
// qwen35, llama-cpp-python 0.3.36:
//     WRONG: drafted [2 2 54] after the restore, [46 41 16] before; max abs error of the draft logits 7.8
// control, without the other work:
//     right: drafted [46 41 16] after the restore, [46 41 16] before; max abs error of the draft logits 0
#include "plain.h"

static int program(bool control) {
    speculation s({ COMMON_SPECULATIVE_TYPE_DRAFT_MTP });
    s.decode(0, 0, text(12));
    const auto target = save(s.tgt, 0);
    const auto draft  = save(s.dft, 0);
    std::vector<uint8_t> driver;
    must(!common_speculative_get_state(s.spec, 0, driver), "the driver offers state, then save it too");

    const drafted before = s.draft(0, 12, 7);
    s.cut_draft(0, 12);
    if (!control) {
        s.decode(0, 12, text(6, 1));
    }
    restore(s.tgt, 0, target);
    restore(s.dft, 0, draft);
    const drafted after = s.draft(0, 12, 7);
    return judge("after the restore", after, "before", before);
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
