# FLATSHARD_SANITIZE=address,undefined: the folders without torch and their
# tests, instrumented. libtorch itself is not, so nothing else is built.
# FLATSHARD_SANITIZE=thread: also streams and the flight recorder, whose threads
# are Flatshard's; tests/thread_sanitizer.supp leaves out torch's.
set(FLATSHARD_SANITIZE "" CACHE STRING "comma-separated -fsanitize= list")
if(FLATSHARD_SANITIZE)
  add_compile_options(
    -fsanitize=${FLATSHARD_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${FLATSHARD_SANITIZE})
endif()
