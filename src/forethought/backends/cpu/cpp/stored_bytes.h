// Bytes of a file, read past the position that it has.

#pragma once

#include <cerrno>
#include <cstdint>

#include <unistd.h>

// Read `size` bytes at `offset`. Returns whether all of them could be read; else what `to` holds is
// not to be used.
static bool read_stored_bytes(int file, uint8_t* to, int64_t size, int64_t offset) {
    int64_t done = 0;
    while (done < size) {
        const ssize_t count = pread(file, to + done, size - done, offset + done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        done += count;
    }
    return true;
}
