/* Patterns of module names: what Python's re.match and fnmatch say, and that no pattern takes long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "io/pattern.h"

enum { NO, YES, UNREAD };

static struct arena arena;
static moe4_allocator allocator;

static int matches(const char *text, const char *name)
{
    struct pattern pattern;
    assert_true(pattern_read(&arena, &allocator, text, &pattern));
    int answer = pattern_matches(&pattern, name, strlen(name));
    if (pattern.kind != PATTERN_UNREAD) return answer;
    assert_false(answer);
    return UNREAD;
}

/* Each answer is that of Python 3.11: bool(re.match(pattern, name)), or fnmatch's. */
static void test_answers(void **state)
{
    static const struct {
        const char *pattern, *name;
        int answer;
    } cases[] = {
        {"lm_head", "lm_head", YES},
        {"lm_head", "lm_head2", NO},
        {"", "", YES},
        {"*", "", YES},
        {"*.experts.3.*", "layers.1.experts.3.w1", YES},
        {"*.experts.3.*", "layers.1.experts.33.w1", NO},
        {"a*b*c", "a__b__b_c", YES},
        {"a*b*c", "a__b__b_", NO},
        {"re:", "anything", YES},
        {"re:lm_head", "lm_head2", YES},
        {"re:lm_head", "x.lm_head", NO},
        {"re:.*lm_head", "x.lm_head.y", YES},
        {"re:lm_head$", "lm_head2", NO},
        {"re:^lm_head$", "lm_head", YES},
        {"re:a^b", "ab", NO},
        {"re:model\\.layers\\.\\d+\\.self_attn\\..*", "model.layers.12.self_attn.q_proj", YES},
        {"re:model\\.layers\\.\\d+\\.self_attn\\..*", "modelxlayers.12.self_attn.q_proj", NO},
        {"re:model\\.layers\\.\\d+\\.self_attn\\..*", "model.layers..self_attn.q_proj", NO},
        {"re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.gate_up_proj", YES},
        {"re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.experts.0.gate_proj", NO},
        {"re:.*experts\\.[0-9]+\\.", "layers.3.experts.17.w1", YES},
        {"re:.*experts\\.[^0-9]+\\.", "layers.3.experts.17.w1", NO},
        {"re:[]a]", "]", YES},
        {"re:[a\\d-]+$", "a-1", YES},
        {"re:[\\W]", "_", NO},
        {"re:\\S\\s\\w\\D", "a b.", YES},
        {"re:colou?r$", "color", YES},
        {"re:colou?r$", "colouur", NO},
        {"re:(?:ab)+$", "ababab", YES},
        {"re:(?:ab)+$", "ababa", NO},
        {"re:(a|b)*?c", "abbac", YES},
        {"re:a|b", "b", YES},
        {"re:ab|cd$", "abx", YES},
        {"re:ab|cd$", "cdx", NO},
        {"re:(a|(b|c)d)e", "cde", YES},
        {"re:(a|(b|c)d)e", "ce", NO},
        {"re:()*", "", YES},
        {"re:(a*)*b", "aaaaaaac", NO},
        {"re:x(|y)z", "xz", YES},
        {"re:\xff", "\xff", YES},
        {"re:(?!.*experts).*", "lm_head", UNREAD},
        {"re:(?=a)", "a", UNREAD},
        {"re:(?P<n>a)", "a", UNREAD},
        {"re:(a)\\1", "aa", UNREAD},
        {"re:a{2}", "aa", UNREAD},
        {"re:a++", "aa", UNREAD},
        {"re:*a", "a", UNREAD},
        {"re:(a", "a", UNREAD},
        {"re:a)", "a", UNREAD},
        {"re:[a", "a", UNREAD},
        {"re:[b-a]", "a", UNREAD},
        {"re:a\\", "a", UNREAD},
        {"re:\\b", "a", UNREAD},
        {"re:((((((((((((((((((a))))))))))))))))))", "a", UNREAD}, /* deeper than sixteen */
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (matches(cases[i].pattern, cases[i].name) != cases[i].answer)
            fail_msg("\"%s\" and \"%s\": expected %d", cases[i].pattern, cases[i].name, cases[i].answer);
}

/* Patterns that a matcher with backtracking takes years for, and one that is too long. */
static void test_time(void **state)
{
    char name[2001], longest[2004] = "re:";
    (void)state;
    memset(name, 'a', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    clock_t start = clock();
    assert_int_equal(matches("re:(a*)*(a*)*(a|aa)*(a?)*b", name), NO);
    assert_int_equal(matches("re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)x", name), NO);
    assert_int_equal(matches("a*a*a*a*a*a*a*a*a*a*b", name), NO);
    assert_true((clock() - start) / CLOCKS_PER_SEC < 2);
    memset(longest + 3, 'a', 2000);
    assert_int_equal(matches(longest, name), UNREAD);
}

int main(void)
{
    allocator = memory_default_allocator();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_answers), cmocka_unit_test(test_time)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    arena_release(&arena, &allocator);
    return failed;
}
