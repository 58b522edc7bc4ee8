// For LD_PRELOAD: looking up or opening a path below $SLOW_FOLDER takes $SLOW_US microseconds longer, as on a busy shared file system.
// The number of such calls is appended to the file $SLOW_COUNT at the process's end.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *folder;
static size_t length;
static useconds_t delay;
static long calls;

__attribute__((constructor)) static void begin(void) {
  folder = getenv("SLOW_FOLDER");
  length = folder ? strlen(folder) : 0;
  delay = getenv("SLOW_US") ? atoi(getenv("SLOW_US")) : 0;
}

__attribute__((destructor)) static void end(void) {
  const char *path = getenv("SLOW_COUNT");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) {
    fprintf(file, "%ld\n", calls);
    fclose(file);
  }
}

static void wait_for(const char *path) {
  if (!length || !path || strncmp(path, folder, length)) return;
  calls++;
  if (delay) usleep(delay);
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)

int stat(const char *path, struct stat *out) { NEXT(stat); wait_for(path); return next(path, out); }
int stat64(const char *path, struct stat64 *out) { NEXT(stat64); wait_for(path); return next(path, out); }
int lstat(const char *path, struct stat *out) { NEXT(lstat); wait_for(path); return next(path, out); }
int lstat64(const char *path, struct stat64 *out) { NEXT(lstat64); wait_for(path); return next(path, out); }
int access(const char *path, int mode) { NEXT(access); wait_for(path); return next(path, mode); }
ssize_t readlink(const char *path, char *out, size_t size) { NEXT(readlink); wait_for(path); return next(path, out, size); }
DIR *opendir(const char *path) { NEXT(opendir); wait_for(path); return next(path); }

#define OPEN(name)                                   \
  int name(const char *path, int flags, ...) {       \
    va_list rest;                                    \
    va_start(rest, flags);                           \
    mode_t mode = va_arg(rest, mode_t);              \
    va_end(rest);                                    \
    NEXT(name);                                      \
    wait_for(path);                                  \
    return next(path, flags, mode);                  \
  }
OPEN(open)
OPEN(open64)
