/* A file system over a network, or on a disk that is slow, full or broken, as its user sees it: loaded before the C
 * library (LD_PRELOAD), it delays calls on files below a folder. What is asked is done by the real file system.
 *
 *     SLOW_UNDER   the folder
 *     SLOW_MS      how long each call takes, milliseconds
 *     SLOW_HOLD    while there is a file of this name, calls below the folder do not return: a server that is away
 *     SLOW_FAILS   while there is a file of this name, one call fails: it has the call's name and an errno, "pwrite 28";
 *                  "pwrite 0": half of it is done, in whole blocks; of more than one nine bytes less are said to be
 *     SLOW_LOG     a file to which is added what was done: 'P', first byte and bytes (8 bytes each) and the bytes of a
 *                  pwrite; 'S' of an fdatasync
 *     SLOW_LIES    while there is a file of this name, a rename is done and reported as failed (EIO): its answer is lost
 *
 * Calls by name, and those on descriptors that were opened below the folder.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_FDS 65536
#define BLOCK 4096
static unsigned char below[MOST_FDS];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void pause_ms(long ms) {
    struct timespec left = {ms / 1000, (ms % 1000) * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) {
    }
}

static void wait_for_server(void) {
    const char *ms = getenv("SLOW_MS"), *hold = getenv("SLOW_HOLD");
    int before = errno;
    pause_ms(ms ? atol(ms) : 0);
    while (hold && syscall(SYS_access, hold, F_OK) == 0) {
        pause_ms(5);
    }
    errno = before;
}

static int is_below(const char *path) {
    const char *under = getenv("SLOW_UNDER");
    return under && path && !strncmp(path, under, strlen(under));
}

static void by_name(const char *path) {
    if (is_below(path)) {
        wait_for_server();
    }
}

static void by_fd(int fd) {
    if (fd >= 0 && fd < MOST_FDS && below[fd]) {
        wait_for_server();
    }
}

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < MOST_FDS) {
        below[fd] = (unsigned char)is_below(path);
    }
    return fd;
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                  \
        by_name(path);                                                                                                 \
        return opened(REAL(name)(path, flags, mode), path);                                                            \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    by_fd(fd);
    opened(fd, NULL);
    return REAL(close)(fd);
}

ssize_t write(int fd, const void *data, size_t size) {
    by_fd(fd);
    return REAL(write)(fd, data, size);
}

ssize_t read(int fd, void *data, size_t size) {
    by_fd(fd);
    return REAL(read)(fd, data, size);
}

int fsync(int fd) {
    by_fd(fd);
    return REAL(fsync)(fd);
}

/* Its errno, or 0 for one that does half; -1: it does not fail. */
static int fails(int fd, const char *call) {
    char said[64] = "", name[32] = "";
    int code = -1;
    const char *path = getenv("SLOW_FAILS");
    int file = path && fd >= 0 && fd < MOST_FDS && below[fd] ? (int)syscall(SYS_open, path, O_RDONLY) : -1;
    if (file < 0) {
        return -1;
    }
    long got = syscall(SYS_read, file, said, sizeof said - 1);
    syscall(SYS_close, file);
    return got > 0 && sscanf(said, "%31s %d", name, &code) == 2 && !strcmp(name, call) ? code : -1;
}

/* Of this process alone, one thread at a time. */
static void note(int fd, const void *head, size_t head_size, const void *data, size_t size) {
    const char *path = getenv("SLOW_LOG");
    int file = path && fd >= 0 && fd < MOST_FDS && below[fd] ? (int)syscall(SYS_open, path, O_WRONLY | O_APPEND) : -1;
    if (file >= 0) {
        syscall(SYS_write, file, head, head_size);
        syscall(SYS_write, file, data, size);
        syscall(SYS_close, file);
    }
}

static ssize_t put(int fd, const void *data, size_t size, off_t at) {
    by_fd(fd);
    int code = fails(fd, "pwrite");
    if (code > 0) {
        errno = code;
        return -1;
    }
    ssize_t done = syscall(SYS_pwrite64, fd, data, code || size < 2 * BLOCK ? size : size / 2 / BLOCK * BLOCK, at);
    if (done > 0) {
        char head[17] = "P";
        memcpy(head + 1, &at, 8), memcpy(head + 9, &done, 8);
        note(fd, head, sizeof head, data, (size_t)done);
    }
    return done > BLOCK && (size_t)done < size ? done - 9 : done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return put(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    return put(fd, data, size, at);
}

int fdatasync(int fd) {
    by_fd(fd);
    int code = fails(fd, "fdatasync");
    if (code > 0) {
        errno = code;
        return -1;
    }
    int failed = REAL(fdatasync)(fd);
    if (!failed) {
        note(fd, "S", 1, NULL, 0);
    }
    return failed;
}

int stat(const char *path, struct stat *out) {
    by_name(path);
    return REAL(stat)(path, out);
}

int stat64(const char *path, struct stat64 *out) {
    by_name(path);
    return REAL(stat64)(path, out);
}

int unlink(const char *path) {
    by_name(path);
    return REAL(unlink)(path);
}

int mkdir(const char *path, mode_t mode) {
    by_name(path);
    return REAL(mkdir)(path, mode);
}

DIR *opendir(const char *path) {
    by_name(path);
    return REAL(opendir)(path);
}

int rename(const char *from, const char *to) {
    by_name(to);
    int done = REAL(rename)(from, to);
    const char *lies = getenv("SLOW_LIES");
    if (!done && is_below(to) && lies && syscall(SYS_access, lies, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return done;
}
