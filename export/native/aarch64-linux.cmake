# For cmake -DCMAKE_TOOLCHAIN_FILE=...: Debian's g++-aarch64-linux-gnu, for 64-bit ARM Linux with glibc.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Programs, Python among them, are this machine's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
