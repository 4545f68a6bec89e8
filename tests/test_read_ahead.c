/* Reading ahead: a kernel that asks for a block's lines at each block asks for all of the panel at hand, then for the
 * next one's beginning, and for nothing else. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/read_ahead.h"

enum { BLOCKS = 80, PANEL_BYTES = BLOCKS * PANEL_BLOCK_BYTES, N_PANELS = 4, BLOCK_LINES = 17 };

static uint8_t memory[N_PANELS * PANEL_BYTES];
static char asked[N_PANELS * PANEL_BYTES / LINE_BYTES + BLOCK_LINES]; /* a block may reach beyond its panel */

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

/* What a kernel does that takes a panel's blocks one by one, n_lines a block. */
static void multiply(struct read_ahead *ahead, int n_lines)
{
    for (int b = 0; b < BLOCKS; b++) {
        if (ahead->at >= ahead->end) ahead->at = read_ahead_turn(ahead);
        for (int i = 0; i < n_lines; i++, ahead->at += LINE_BYTES)
            asked[(ahead->at - (uintptr_t)memory) / LINE_BYTES] = 1;
    }
}

static void test_next_panel_is_begun(void **state)
{
    (void)state;
    enum { LEAST = READ_AHEAD_LEAST / LINE_BYTES, LINES = PANEL_BYTES / LINE_BYTES };
    struct read_ahead ahead = {0};
    memset(asked, 0, sizeof asked);
    read_ahead_begin(&ahead, panel(2), PANEL_BYTES);
    read_ahead_then(&ahead, panel(0), PANEL_BYTES);
    multiply(&ahead, BLOCK_LINES);
    assert_int_equal(count_asked(2, LEAST, LINES), LINES - LEAST);
    assert_int_equal(count_asked(0, 0, LEAST), LEAST);
    assert_int_equal(count_asked(0, LEAST, LINES) + count_asked(1, 0, LINES) + count_asked(3, BLOCK_LINES, LINES), 0);
    read_ahead_begin(&ahead, panel(0), PANEL_BYTES); /* goes on where it was */
    multiply(&ahead, BLOCK_LINES);
    assert_int_equal(count_asked(0, 0, LINES), LINES);
    assert_int_equal(count_asked(1, BLOCK_LINES, LINES), 0);
}

/* Nothing follows: the last lines again, and not those of whoever lies behind. */
static void test_end(void **state)
{
    (void)state;
    enum { LINES = PANEL_BYTES / LINE_BYTES };
    struct read_ahead ahead = {0};
    memset(asked, 0, sizeof asked);
    read_ahead_begin(&ahead, panel(1), PANEL_BYTES);
    multiply(&ahead, BLOCK_LINES);
    multiply(&ahead, BLOCK_LINES);
    assert_int_equal(count_asked(0, 0, LINES) + count_asked(2, BLOCK_LINES, LINES) + count_asked(3, 0, LINES), 0);
}

/* However much faster than use: only so much of the next panel that both fit the cache. */
static void test_most(void **state)
{
    (void)state;
    struct read_ahead ahead = {0};
    read_ahead_begin(&ahead, panel(0), PANEL_BYTES);
    read_ahead_then(&ahead, panel(1), 2 * PANEL_BYTES);
    read_ahead_turn(&ahead);
    assert_true(ahead.end - (uintptr_t)panel(1) == READ_AHEAD_MOST);
    assert_true(READ_AHEAD_MOST < 2 * PANEL_BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_next_panel_is_begun),
        cmocka_unit_test(test_end),
        cmocka_unit_test(test_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
