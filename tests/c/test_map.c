/* Creating and mapping memory objects: seals, bounds, page slop, errors. */
#include "check.h" /* first: asks for GNU extensions */

#include <fcntl.h>
#include <sys/mman.h>

int main(void)
{
    watchdog();
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    CHECK_EQ(nnb_memfd_create("x", 0, NNB_SEALS_FIXED_SIZE), -EINVAL);
    CHECK_EQ(nnb_memfd_create("x", UINT64_MAX, NNB_SEALS_FIXED_SIZE), -EOVERFLOW);
    int fd = nnb_memfd_create("x", 3 * page + 10, NNB_SEALS_FIXED_SIZE);
    CHECK(fd >= 0);
    CHECK_EQ(nnb_seals(fd) & NNB_SEALS_FIXED_SIZE, NNB_SEALS_FIXED_SIZE);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK_EQ(nnb_fd_size(fd), 3 * page + 10);
    CHECK_EQ(ftruncate(fd, 0), -1);
    CHECK_EQ(ftruncate(fd, (off_t)(9 * page)), -1);

    nnb_mapping whole, part;
    CHECK_EQ(nnb_map(&whole, fd, 0, 3 * page + 10, PROT_READ | PROT_WRITE, 1), 0);
    CHECK_EQ(whole.guard, -1); /* sealed: needs none */
    CHECK_EQ(nnb_map_faults(&whole), 0);
    CHECK_EQ(nnb_map(&part, fd, page + 5, page, PROT_READ, 1), 0);
    whole.addr[page + 5] = 1;
    whole.addr[2 * page + 4] = 2;
    CHECK(part.addr[0] == 1 && part.addr[page - 1] == 2);
    nnb_unmap(&part);
    nnb_unmap(&part); /* idempotent */
    nnb_unmap(&whole);
    nnb_unmap(NULL);

    CHECK_EQ(nnb_map(&part, fd, 0, 0, PROT_READ, 1), -EINVAL);
    CHECK_EQ(nnb_map(&part, fd, 0, page, PROT_EXEC, 1), -EINVAL);
    CHECK_EQ(nnb_map(&part, fd, 0, 3 * page + 11, PROT_READ, 1), -EOVERFLOW);
    CHECK_EQ(nnb_map(&part, fd, 3 * page + 10, 1, PROT_READ, 1), -EOVERFLOW);
    CHECK_EQ(nnb_map(&part, fd, UINT64_MAX, 2, PROT_READ, 1), -EOVERFLOW);
    CHECK_EQ(nnb_map(&part, fd, 2, UINT64_MAX, PROT_READ, 1), -EOVERFLOW);
    CHECK_EQ(nnb_fd_filesystem(fd), 0x01021994); /* tmpfs */
    close(fd);
    CHECK_EQ(nnb_fd_filesystem(fd), -EBADF);
    CHECK_EQ(nnb_map(&part, fd, 0, 1, PROT_READ, 1), -EBADF);
    CHECK_EQ(nnb_seals(fd), -EBADF);
    CHECK_EQ(nnb_fd_size(fd), -EBADF);
    CHECK(part.base == NULL);

    int unsealed = memfd_create("x", 0);
    CHECK_EQ(nnb_map(&part, unsealed, 0, 1, PROT_READ, 1), -EOVERFLOW); /* of nothing */
    CHECK_EQ(ftruncate(unsealed, 1), 0);
    for (int guarded = 0; guarded < 2; guarded++) {
        CHECK_EQ(nnb_map(&part, unsealed, 0, 1, PROT_READ, guarded), 0);
        CHECK_EQ(part.guard >= 0, guarded);
        nnb_unmap(&part);
    }
    close(unsealed);

    int pipes[2];
    CHECK_EQ(pipe(pipes), 0);
    CHECK_EQ(nnb_fd_size(pipes[0]), -ENODEV);
    CHECK_EQ(nnb_seals(pipes[0]), 0);
    CHECK_EQ(nnb_map(&part, pipes[0], 0, 1, PROT_READ, 1), -ENODEV);
    close(pipes[0]);
    close(pipes[1]);
    return 0;
}
