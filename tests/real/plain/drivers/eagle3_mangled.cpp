// draft-eagle3: a state with an impossible position is taken, a state of the wrong length is ignored, and neither is said.
//
// common_speculative_set_state() returns void. The driver's set_state() compares the length only: a wrong one returns without a
// line in the log, and a position is taken as it is, whatever the memories hold. From then on drafts are empty, and the next
// process() fails, since the cell that waited is missing. (libllama complains at those later calls.) Compile line: plain.h.
//
// qwen35 + eagle3-qwen35, llama-cpp-python 0.3.36:
//     WRONG: drafted [38 1 8]; with 131 of 132 bytes [38 1 8]; with position 100000 [], then process() fails; nothing in the log
// control, the state unchanged:
//     right: drafted [38 1 8]; with 132 of 132 bytes [38 1 8]; with position 7 [38 1 8], then process() works; nothing in the log
#include "plain.h"

#include "log.h"

// in place of libllama-common's own, which prints from a thread
static int lines = 0;
void common_log_add(struct common_log *, enum ggml_log_level level, const char *, ...) {
    lines += level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR;
}

static int program(bool control) {
    speculation s({ COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 });
    common_speculative_begin(s.spec, 1, text(8));
    must(lines == 1, "a warning is not counted"); // this one is: nothing was processed

    s.decode(0, 0, text(8));
    std::vector<uint8_t> good;
    must(common_speculative_get_state(s.spec, 0, good), "the driver offers no state");
    const drafted before = s.draft(0, 8, 7);

    // the draft of a state, and whether anything was said when it was handed in
    bool said = false;
    const auto with = [&](const std::vector<uint8_t> & state) {
        s.cut_draft(0, 7); // the last position waits again
        lines = 0;
        common_speculative_set_state(s.spec, 0, state);
        said |= lines != 0;
        return s.draft(0, 8, 7);
    };
    llama_pos pos = 7;
    std::vector<uint8_t> far = good, cut = good;
    if (!control) {
        pos = 100000;
        memcpy(far.data(), &pos, sizeof(pos));
        cut.assign(far.begin(), far.end() - 1);
    }
    const drafted after_cut = with(cut), after_far = with(far);

    common_batch b(s.tgt);
    b.add(7,  8, 0, false);
    b.add(38, 9, 0, true);
    must(llama_process(s.tgt, LLAMA_PROCESS_TYPE_DECODE, b.get()) == 0, "the target does not decode");
    s.cut_draft(0, 8);
    const bool goes_on = common_speculative_process(s.spec, b);

    const bool ignored = after_cut.tokens == before.tokens && cut.size() != good.size();
    const bool wrong   = !said && (ignored || after_far.tokens != before.tokens);
    printf("%s: drafted %s; with %zu of %zu bytes %s; with position %d %s, then process() %s; %s in the log\n",
        wrong ? "WRONG" : "right", str(before.tokens).c_str(), cut.size(), good.size(), str(after_cut.tokens).c_str(),
        pos, str(after_far.tokens).c_str(), goes_on ? "works" : "fails", said ? "a line" : "nothing");
    return wrong;
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
