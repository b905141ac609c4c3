// draft-mtp: a tail is cut off both memories, and the next token is paired with the hidden row of the old end.
//
// This is how a server keeps the common beginning of two prompts. No call of speculative.h tells the driver, and
// common_speculative_impl_draft_mtp::process() does not look whether pending_h is the row of the position before its batch.
// Chained heads (step35) here; one head does the same. Compile line: plain.h.
//
// step35, llama-cpp-python 0.3.36:
//     WRONG: drafted [26 47 45] after the cut, [26 47 45] of the same tokens without; max abs error of the draft logits 0.61
// control, nothing behind the cut:
//     right: drafted [26 47 45] after the cut, [26 47 45] of the same tokens without; max abs error of the draft logits 0
#include "plain.h"

static int program(bool control) {
    const int kept = 8;
    std::vector<float> target;
    drafted clean;
    {
        speculation fresh({ COMMON_SPECULATIVE_TYPE_DRAFT_MTP });
        fresh.decode(0, 0, text(kept));
        target = fresh.decode(0, kept, text(4, 1));
        clean = fresh.draft(0, kept + 4, 7);
    }
    speculation s({ COMMON_SPECULATIVE_TYPE_DRAFT_MTP });
    s.decode(0, 0, text(kept + (control ? 0 : 3)));
    s.cut_both(0, kept);
    must_agree(s.decode(0, kept, text(4, 1)), target);
    return judge("after the cut", s.draft(0, kept + 4, 7), "of the same tokens without", clean);
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
