/* Reading ahead: a kernel that asks for a block's pairs of lines at each block asks for all of the panel at hand, then
 * for the next one's beginning, and for nothing else. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/read_ahead.h"

enum {
    BLOCKS = 80,
    PANEL_BYTES = BLOCKS * PANEL_BLOCK_BYTES,
    N_PANELS = 4,
    BLOCK_PAIRS = 9, /* at most: every other block has one less */
    LINES = PANEL_BYTES / LINE_BYTES,
    N_RUNS = 4,
    RUN = LINES / N_RUNS,
    UNASKED = RUN / 4 * 3 /* of the first two runs, where a thread begins */
};

static uint8_t memory[N_PANELS * PANEL_BYTES];
static char asked[N_PANELS * PANEL_BYTES / LINE_BYTES + BLOCK_PAIRS]; /* a block may reach beyond its panel */

static uint8_t *panel(int i)
{
    return memory + i * PANEL_BYTES;
}

static int count_asked(int i, int first_line, int last_line)
{
    int n = 0;
    for (int line = first_line; line < last_line; line++) n += asked[i * PANEL_BYTES / LINE_BYTES + line];
    return n;
}

/* What a kernel does that takes a panel's blocks one by one. */
static void multiply(struct read_ahead *ahead)
{
    for (int b = 0; b < BLOCKS; b++) {
        if (ahead->pair.at >= ahead->run_end) read_ahead_turn(ahead);
        for (int i = 0; i < BLOCK_PAIRS - b % 2; i++, ahead->pair.at += LINE_BYTES) {
            const uintptr_t line = ahead->pair.at - (uintptr_t)memory;
            asked[line / LINE_BYTES] = asked[(line + ahead->pair.apart) / LINE_BYTES] = 1;
        }
    }
}

static void test_next_panel_is_begun(void **state)
{
    (void)state;
    struct read_ahead ahead = {0};
    memset(asked, 0, sizeof asked);
    read_ahead_begin(&ahead, panel(2), PANEL_BYTES);
    read_ahead_then(&ahead, panel(0), PANEL_BYTES);
    multiply(&ahead);
    assert_int_equal(count_asked(2, UNASKED, RUN) + count_asked(2, RUN + UNASKED, LINES), LINES - 2 * UNASKED);
    assert_in_range(count_asked(0, 0, RUN), UNASKED - N_RUNS * BLOCK_PAIRS, UNASKED); /* as much as was left out */
    assert_in_range(count_asked(0, RUN, LINES), UNASKED - N_RUNS * BLOCK_PAIRS, UNASKED);
    assert_int_equal(count_asked(1, BLOCK_PAIRS, LINES) + count_asked(3, BLOCK_PAIRS, LINES), 0);
    const int n = count_asked(0, 0, RUN);
    read_ahead_begin(&ahead, panel(0), PANEL_BYTES); /* goes on where it was, or where it ought to be */
    multiply(&ahead);
    assert_int_equal(count_asked(0, 0, LINES), LINES - 2 * (UNASKED - n));
    assert_int_equal(count_asked(1, BLOCK_PAIRS, LINES), 0);
}

/* Nothing follows: the last lines again, and not those of whoever lies behind. */
static void test_end(void **state)
{
    (void)state;
    struct read_ahead ahead = {0};
    memset(asked, 0, sizeof asked);
    read_ahead_begin(&ahead, panel(1), PANEL_BYTES);
    multiply(&ahead);
    multiply(&ahead);
    assert_int_equal(count_asked(0, 0, LINES) + count_asked(2, BLOCK_PAIRS, LINES) + count_asked(3, 0, LINES), 0);
}

/* However much faster than use: only so much of the next panel that both fit the cache. */
static void test_large_panel(void **state)
{
    (void)state;
    enum { LARGE = 2 * PANEL_BYTES, MOST = READ_AHEAD_MOST / LINE_BYTES };
    struct read_ahead ahead = {0};
    memset(asked, 0, sizeof asked);
    _Static_assert((int)LARGE > (int)READ_AHEAD_MOST, "more than is read of the next");
    read_ahead_begin(&ahead, panel(0), LARGE);
    read_ahead_then(&ahead, panel(2), LARGE);
    for (int i = 0; i < 8; i++) multiply(&ahead);
    assert_in_range(count_asked(2, 0, 2 * LINES), MOST / 2, MOST + BLOCK_PAIRS);
    assert_int_equal(count_asked(2, MOST + BLOCK_PAIRS, 2 * LINES), 0);
    read_ahead_begin(&ahead, panel(2), LARGE);
    for (int i = 0; i < 2; i++) multiply(&ahead);
    assert_in_range(count_asked(2, 0, 2 * LINES), 2 * LINES - 2 * N_RUNS, 2 * LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_next_panel_is_begun),
        cmocka_unit_test(test_end),
        cmocka_unit_test(test_large_panel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
