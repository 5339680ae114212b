# The stock library that tests compare with, without what they do not use: CMAKE_PROJECT_INCLUDE of its build.
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)
