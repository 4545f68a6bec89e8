# Thin: installs what is missing, then calls CMake.
#
#   make run [MODEL=FOLDER] [ARGS=...]     run an MoE layer of a gpt-oss checkpoint and check it; ARGS as `moe4 run --help`
#   make test                              build everything and run the tests
#   make bench [ARGS=...]                  time the kernels; ARGS as `moe4 bench --help`
#   make install [PREFIX=...] [DESTDIR=]   library, headers, command, man pages, completion
#   make format, make format-check, make clean

PREFIX ?= /usr/local
CLANG_FORMAT ?= clang-format-14
SYNTH = models/gpt-oss-20b-synth
C_FILES = $(shell find . \( -path './build*' -o -path ./models -o -path ./.git \) -prune -o -name '*.[ch]' -print)

.DEFAULT_GOAL = command
.PHONY: configure command run test bench install format format-check clean

configure:
	@scripts/install-deps build
	@cmake --preset release >/dev/null

command: configure
	@cmake --build --preset release --target moe4_command

# Without a download: one layer of the true 20b shape, half a gigabyte, made once.
run: command
ifeq ($(MODEL),)
	@mkdir -p models
	build/moe4 synth --like gpt-oss-20b --layers 1 $(SYNTH)
endif
	build/moe4 run "$(or $(MODEL),$(SYNTH))" --check $(ARGS)

test: configure
	@scripts/install-deps test
	@cmake --build --preset release
	ctest --preset release

bench: command
	build/moe4 bench $(ARGS)

install: configure
	@cmake --preset release -DCMAKE_INSTALL_PREFIX="$(PREFIX)" >/dev/null
	@cmake --build --preset release
	cmake --install build

format:
	@$(CLANG_FORMAT) -i $(C_FILES)

format-check:
	@$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)

clean:
	rm -rf build build-*
