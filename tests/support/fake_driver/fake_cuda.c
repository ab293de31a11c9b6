/* A driver of CUDA without a card, built as libcuda.so.1: the calls on memory that Quire makes through cuda-bindings.

   Physical memory is one memfd. cuMemMap maps a handle's bytes of it at the reserved address, so bytes are real and one
   handle at two addresses is one memory. Addresses without cuMemSetAccess are PROT_NONE: touching them ends the process.
   A new handle's bytes are 0xFF, a NaN in each floating dtype.

   Work on streams is done at once. After fake_run(address, bytes) a kernel that uses this range counts as running until
   an event recorded later is waited for, a stream is synchronized, or fake_finish: cuEventQuery says "not ready", and
   unmapping the range is a fault. A fault is sticky (CUDA_ERROR_ILLEGAL_ADDRESS from then on) and leaves a text.
   fake_fail(n, code) lets the n-th later call that takes or changes memory fail with `code`, without effect. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } Prop;
typedef struct { Location location; int flags; } Access;
typedef struct {
    size_t src_x, src_y; int src_type; const void *src_host; u64 src_device; void *src_array; size_t src_pitch;
    size_t dst_x, dst_y; int dst_type; void *dst_host; u64 dst_device; void *dst_array; size_t dst_pitch;
    size_t width, height;
} Copy2D;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum { MAX_RANGES = 4096, MAX_HANDLES = 65536, MAX_MAPPINGS = 262144, MAX_EVENTS = 65536, MAX_NAMES = 64 };

typedef struct { u64 address; size_t bytes; } Range;
typedef struct { size_t offset, bytes; int created, maps; } Handle;
typedef struct { u64 address; size_t bytes; int handle, access; } Mapping;
typedef struct { int used; u64 recorded; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t granularity = 2u << 20, total = 512u << 20;
static int memory = -1, initialized, sticky;
static unsigned char *taken; /* of each page of the memory */
static Range ranges[MAX_RANGES];
static Handle handles[MAX_HANDLES]; /* number 0 is none */
static Mapping mappings[MAX_MAPPINGS];
static int num_ranges, num_handles = 1, num_mappings;
static Event events[MAX_EVENTS];
static u64 clock_, finished; /* kernels up to `finished` have ended */
static Range running;        /* addresses of the kernel `clock_`, while finished < clock_ */
static long fail_at, failed, fail_code;
static char fault[512];
static struct { const char *name; long calls; } names[MAX_NAMES];
static __thread int has_context;

static void count(const char *name) {
    for (int i = 0; i < MAX_NAMES; i++) {
        if (!names[i].name) names[i].name = name;
        if (!strcmp(names[i].name, name)) { names[i].calls++; return; }
    }
}

/* The result that a call has before it does anything, OK to go on. */
static int enter(const char *name, int can_fail) {
    count(name);
    if (!initialized) return NOT_INITIALIZED;
    if (sticky) return sticky;
    if (can_fail && fail_at && --fail_at == 0) { failed++; return (int)fail_code; }
    return OK;
}

static int fault_of(const char *format, u64 address, size_t bytes) {
    if (!*fault) snprintf(fault, sizeof fault, format, address, bytes);
    return sticky = ILLEGAL_ADDRESS;
}

static void start_memory(void) {
    if (memory >= 0) return;
    memory = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, (off_t)total)) abort();
    taken = calloc(total / granularity, 1);
}

static size_t bytes_taken(void) {
    size_t pages = 0;
    for (size_t i = 0; taken && i < total / granularity; i++) pages += taken[i];
    return pages * granularity;
}

static void drop_if_unused(Handle *handle) { /* a handle's memory goes when its last mapping has gone, too */
    if (handle->created || handle->maps) return;
    fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)handle->offset, (off_t)handle->bytes);
    memset(taken + handle->offset / granularity, 0, handle->bytes / granularity);
    handle->bytes = 0;
}

static int overlaps(u64 a, size_t bytes, u64 b, size_t more) { return a < b + more && b < a + bytes; }

static int in_reservation(u64 address, size_t bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].address <= address && address + bytes <= ranges[i].address + ranges[i].bytes) return 1;
    return 0;
}

/* Whether every byte is mapped; with `access` also open for access. */
static int is_mapped(u64 address, size_t bytes, int access) {
    size_t covered = 0;
    for (int i = 0; i < num_mappings; i++) {
        Mapping *m = &mappings[i];
        if ((access && !m->access) || !overlaps(m->address, m->bytes, address, bytes)) continue;
        u64 first = m->address > address ? m->address : address;
        u64 last = m->address + m->bytes < address + bytes ? m->address + m->bytes : address + bytes;
        covered += last - first;
    }
    return covered == bytes;
}

static int checked_copy(const char *name, u64 address, size_t bytes) {
    if (is_mapped(address, bytes, 1)) return OK;
    char format[96];
    snprintf(format, sizeof format, "%s touches %%#llx, %%zu bytes, without access", name);
    return fault_of(format, address, bytes);
}

#define CALL(name, can_fail, ...) \
    { pthread_mutex_lock(&lock); int result = enter(name, can_fail); if (result == OK) { __VA_ARGS__ } \
      pthread_mutex_unlock(&lock); return result; }

int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    initialized = 1;
    start_memory();
    pthread_mutex_unlock(&lock);
    return flags ? INVALID_VALUE : OK;
}
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *n) CALL("cuDeviceGetCount", 0, *n = 1;)
int cuDeviceGet(int *device, int ordinal)
    CALL("cuDeviceGet", 0, if (ordinal) result = 101; else *device = 0;)
int cuDeviceGetName(char *name, int size, int device)
    CALL("cuDeviceGetName", 0, (void)device; snprintf(name, (size_t)size, "a fake card");)
int cuDeviceGetAttribute(int *value, int attribute, int device)
    CALL("cuDeviceGetAttribute", 0, (void)device;
         *value = attribute == 102 ? 1 : attribute == 75 ? 9 : 0;)
int cuDeviceTotalMem(size_t *bytes, int device) CALL("cuDeviceTotalMem", 0, (void)device; *bytes = total;)
int cuDevicePrimaryCtxRetain(void **context, int device)
    CALL("cuDevicePrimaryCtxRetain", 0, (void)device; *context = (void *)0x10;)
int cuDevicePrimaryCtxRelease(int device) CALL("cuDevicePrimaryCtxRelease", 0, (void)device;)
int cuCtxSetCurrent(void *context) CALL("cuCtxSetCurrent", 0, has_context = context != 0;)
int cuCtxGetCurrent(void **context) CALL("cuCtxGetCurrent", 0, *context = has_context ? (void *)0x10 : 0;)
int cuCtxSynchronize(void) CALL("cuCtxSynchronize", 0, finished = clock_;)
int cuMemGetInfo(size_t *free_bytes, size_t *all)
    CALL("cuMemGetInfo", 0, if (!has_context) result = INVALID_CONTEXT;
         *free_bytes = total - bytes_taken(); *all = total;)
int cuGetErrorName(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == ILLEGAL_ADDRESS
        ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
    return OK;
}
int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == ILLEGAL_ADDRESS
        ? "an illegal memory access was encountered" : "an error of the fake driver";
    return OK;
}

/* Virtual memory */

int cuMemGetAllocationGranularity(size_t *bytes, const Prop *prop, int option)
    CALL("cuMemGetAllocationGranularity", 0, (void)prop; (void)option; *bytes = granularity;)

int cuMemAddressReserve(u64 *address, size_t bytes, size_t alignment, u64 wanted, u64 flags)
    CALL("cuMemAddressReserve", 1, {
        if (alignment < granularity) alignment = granularity;
        if (!bytes || bytes % granularity || wanted || flags || num_ranges == MAX_RANGES) result = INVALID_VALUE;
        else {
            int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            char *start = mmap(0, bytes + alignment, PROT_NONE, kind, -1, 0);
            if (start == MAP_FAILED) result = OUT_OF_MEMORY;
            else {
                char *first = (char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
                if (first > start) munmap(start, (size_t)(first - start));
                if (start + alignment > first) munmap(first + bytes, (size_t)(start + alignment - first));
                ranges[num_ranges++] = (Range){(u64)first, bytes};
                *address = (u64)first;
            }
        }
    })

int cuMemAddressFree(u64 address, size_t bytes)
    CALL("cuMemAddressFree", 1, {
        result = INVALID_VALUE;
        for (int i = 0; i < num_ranges; i++)
            if (ranges[i].address == address && ranges[i].bytes == bytes) {
                for (int j = 0; j < num_mappings; j++)
                    if (overlaps(mappings[j].address, mappings[j].bytes, address, bytes)) {
                        result = fault_of("addresses %#llx, %zu bytes, are freed while mapped", address, bytes);
                        goto out;
                    }
                munmap((void *)address, bytes);
                ranges[i] = ranges[--num_ranges];
                result = OK;
                break;
            }
        out:;
    })

int cuMemCreate(u64 *handle, size_t bytes, const Prop *prop, u64 flags)
    CALL("cuMemCreate", 1, {
        if (!bytes || bytes % granularity || prop->type != 1 || prop->location.type != 1 || flags)
            result = INVALID_VALUE;
        else {
            size_t pages = bytes / granularity, run = 0, at = 0;
            while (at < total / granularity && run < pages) run = taken[at++] ? 0 : run + 1;
            int number = 1;
            while (number < num_handles && (handles[number].created || handles[number].maps)) number++;
            if (run < pages || number == MAX_HANDLES) result = OUT_OF_MEMORY;
            else {
                if (number == num_handles) num_handles++;
                handles[number] = (Handle){(at - pages) * granularity, bytes, 1, 0};
                memset(taken + at - pages, 1, pages);
                void *whole = mmap(0, bytes, PROT_WRITE, MAP_SHARED, memory, (off_t)handles[number].offset);
                memset(whole, 0xFF, bytes);
                munmap(whole, bytes);
                *handle = (u64)number;
            }
        }
    })

int cuMemRelease(u64 number)
    CALL("cuMemRelease", 1, {
        if (!number || number >= (u64)num_handles || !handles[number].created) result = INVALID_VALUE;
        else {
            handles[number].created = 0;
            drop_if_unused(&handles[number]);
        }
    })

int cuMemMap(u64 address, size_t bytes, size_t offset, u64 number, u64 flags)
    CALL("cuMemMap", 1, {
        if (!number || number >= (u64)num_handles || !handles[number].created || offset || flags ||
            bytes != handles[number].bytes || address % granularity || !in_reservation(address, bytes) ||
            num_mappings == MAX_MAPPINGS)
            result = INVALID_VALUE;
        for (int i = 0; result == OK && i < num_mappings; i++)
            if (overlaps(mappings[i].address, mappings[i].bytes, address, bytes)) result = INVALID_VALUE;
        if (result == OK) {
            off_t place = (off_t)handles[number].offset;
            if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory, place) == MAP_FAILED)
                result = OUT_OF_MEMORY;
            else {
                mappings[num_mappings++] = (Mapping){address, bytes, (int)number, 0};
                handles[number].maps++;
            }
        }
    })

int cuMemUnmap(u64 address, size_t bytes)
    CALL("cuMemUnmap", 1, {
        size_t covered = 0; /* whole mappings only */
        for (int i = 0; i < num_mappings; i++) {
            Mapping *m = &mappings[i];
            if (!overlaps(m->address, m->bytes, address, bytes)) continue;
            if (m->address < address || m->address + m->bytes > address + bytes) result = INVALID_VALUE;
            covered += m->bytes;
        }
        if (covered != bytes) result = INVALID_VALUE;
        if (result == OK && finished < clock_ && overlaps(running.address, running.bytes, address, bytes))
            result = fault_of("addresses %#llx, %zu bytes, are unmapped under a running kernel", address, bytes);
        if (result == OK) {
            int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
            mmap((void *)address, bytes, PROT_NONE, kind, -1, 0);
            for (int i = 0; i < num_mappings;) {
                Mapping *m = &mappings[i];
                if (!overlaps(m->address, m->bytes, address, bytes)) { i++; continue; }
                handles[m->handle].maps--;
                drop_if_unused(&handles[m->handle]);
                *m = mappings[--num_mappings];
            }
        }
    })

int cuMemSetAccess(u64 address, size_t bytes, const Access *access, size_t num)
    CALL("cuMemSetAccess", 1, {
        if (num != 1 || access->location.type != 1 || access->flags != 3 || !is_mapped(address, bytes, 0))
            result = INVALID_VALUE;
        else {
            mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
            for (int i = 0; i < num_mappings; i++)
                if (overlaps(mappings[i].address, mappings[i].bytes, address, bytes)) mappings[i].access = 1;
        }
    })

/* Copies */

#define COPY(name, expected, ...) \
    CALL(name, 1, { if (!has_context) result = INVALID_CONTEXT; else result = (expected); \
                    if (result == OK) { __VA_ARGS__ } })

int cuMemcpyHtoDAsync(u64 to, const void *from, size_t bytes, void *stream)
    COPY("cuMemcpyHtoDAsync", checked_copy("a copy", to, bytes), (void)stream; memcpy((void *)to, from, bytes);)
int cuMemcpyDtoHAsync(void *to, u64 from, size_t bytes, void *stream)
    COPY("cuMemcpyDtoHAsync", checked_copy("a copy", from, bytes), (void)stream; memcpy(to, (void *)from, bytes);)
int cuMemcpyDtoDAsync(u64 to, u64 from, size_t bytes, void *stream)
    COPY("cuMemcpyDtoDAsync", checked_copy("a copy", to, bytes) ? sticky : checked_copy("a copy", from, bytes),
         (void)stream; memmove((void *)to, (void *)from, bytes);)
int cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, void *stream)
    COPY("cuMemsetD8Async", checked_copy("a memset", to, bytes), (void)stream; memset((void *)to, value, bytes);)

static char *row_of(int type, const void *host, u64 device, size_t x, size_t y, size_t pitch, size_t row) {
    char *base = type == 1 ? (char *)host : (char *)device;
    return base + (y + row) * pitch + x;
}

int cuMemcpy2DAsync(const Copy2D *copy, void *stream)
    COPY("cuMemcpy2DAsync",
         (copy->src_type != 1 && copy->src_type != 2) || (copy->dst_type != 1 && copy->dst_type != 2) ? INVALID_VALUE : OK, {
        (void)stream;
        for (size_t row = 0; row < copy->height && result == OK; row++) {
            char *from = row_of(copy->src_type, copy->src_host, copy->src_device, copy->src_x, copy->src_y,
                                copy->src_pitch, row);
            char *to = row_of(copy->dst_type, copy->dst_host, copy->dst_device, copy->dst_x, copy->dst_y,
                              copy->dst_pitch, row);
            if (copy->src_type == 2) result = checked_copy("a 2D copy", (u64)from, copy->width);
            if (copy->dst_type == 2 && !result) result = checked_copy("a 2D copy", (u64)to, copy->width);
            if (!result) memmove(to, from, copy->width);
        }
    })

/* Streams and events */

int cuStreamCreate(void **stream, unsigned flags)
    CALL("cuStreamCreate", 0, (void)flags; *stream = has_context ? (void *)0x20 : 0; if (!*stream) result = INVALID_CONTEXT;)
int cuStreamDestroy(void *stream) CALL("cuStreamDestroy", 0, (void)stream;)
int cuStreamSynchronize(void *stream) /* a stream of its own (0x20) does not wait for the kernel */
    CALL("cuStreamSynchronize", 0, if (stream != (void *)0x20) finished = clock_;)
int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
    CALL("cuStreamWaitEvent", 0, (void)stream; (void)event; (void)flags;)
int cuEventCreate(void **event, unsigned flags)
    CALL("cuEventCreate", 1, {
        (void)flags;
        long at = 1;
        while (at < MAX_EVENTS && events[at].used) at++;
        if (at == MAX_EVENTS || !has_context) result = INVALID_CONTEXT;
        else { events[at] = (Event){1, 0}; *event = (void *)at; }
    })
int cuEventRecord(void *event, void *stream)
    CALL("cuEventRecord", 1, {
        if ((long)event < 1 || (long)event >= MAX_EVENTS || !events[(long)event].used) result = INVALID_HANDLE;
        else events[(long)event].recorded = stream == (void *)0x20 ? 0 : clock_;
    })
int cuEventQuery(void *event)
    CALL("cuEventQuery", 0, if (events[(long)event].recorded > finished) result = NOT_READY;)
int cuEventSynchronize(void *event)
    CALL("cuEventSynchronize", 0,
         if (events[(long)event].recorded > finished) finished = events[(long)event].recorded;)
int cuEventDestroy(void *event)
    CALL("cuEventDestroy", 0, if (!events[(long)event].used) result = INVALID_HANDLE; events[(long)event].used = 0;)

/* What a test asks and tells */

void fake_reset(size_t page_bytes, size_t num_bytes) { /* all handles, ranges and counts go; a fault too */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++) munmap((void *)ranges[i].address, ranges[i].bytes);
    num_ranges = num_mappings = 0;
    num_handles = 1;
    memset(handles, 0, sizeof handles);
    memset(events, 0, sizeof events);
    memset(names, 0, sizeof names);
    if (memory >= 0) close(memory);
    free(taken);
    memory = -1, taken = 0, sticky = 0, *fault = 0, fail_at = failed = 0, clock_ = finished = 0;
    granularity = page_bytes, total = num_bytes;
    if (initialized) start_memory();
    pthread_mutex_unlock(&lock);
}
void fake_fail(long at, long code) { fail_at = at, fail_code = code, failed = 0; }
long fake_failed(void) { return failed; }
void fake_run(u64 address, size_t bytes) { clock_++; running = (Range){address, bytes}; }
void fake_finish(void) { finished = clock_; }
const char *fake_fault(void) { return fault; }
long fake_mappings(void) { return num_mappings; }
long fake_ranges(void) { return num_ranges; }
long fake_events(void) {
    long found = 0;
    for (int i = 0; i < MAX_EVENTS; i++) found += events[i].used;
    return found;
}
long fake_handles(void) {
    long found = 0;
    for (int i = 1; i < num_handles; i++) found += handles[i].created;
    return found;
}
long fake_handle_at(u64 address) { /* 0: not mapped; negative: without access */
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].address <= address && address < mappings[i].address + mappings[i].bytes)
            return mappings[i].access ? mappings[i].handle : -mappings[i].handle;
    return 0;
}
long fake_mapped(u64 address, size_t bytes, u64 *addresses, u64 *numbers, long room) { /* the mappings in a range */
    long found = 0;
    for (int i = 0; i < num_mappings && found < room; i++)
        if (overlaps(mappings[i].address, mappings[i].bytes, address, bytes)) {
            addresses[found] = mappings[i].address;
            numbers[found++] = (u64)mappings[i].handle;
        }
    return found;
}
size_t fake_bytes_taken(void) { return bytes_taken(); }
long fake_calls(const char *name) {
    for (int i = 0; i < MAX_NAMES && names[i].name; i++)
        if (!strcmp(names[i].name, name)) return names[i].calls;
    return 0;
}

/* The table that cuda-bindings asks for its calls. */

#define ENTRY(name) {#name, (void *)name}
static const struct { const char *name; void *call; } calls[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuDeviceTotalMem), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSynchronize),
    ENTRY(cuMemGetInfo), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString), ENTRY(cuMemGetAllocationGranularity),
    ENTRY(cuMemAddressReserve), ENTRY(cuMemAddressFree), ENTRY(cuMemCreate), ENTRY(cuMemRelease), ENTRY(cuMemMap),
    ENTRY(cuMemUnmap), ENTRY(cuMemSetAccess), ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync),
    ENTRY(cuMemcpyDtoDAsync), ENTRY(cuMemsetD8Async), ENTRY(cuMemcpy2DAsync), ENTRY(cuStreamCreate),
    ENTRY(cuStreamDestroy), ENTRY(cuStreamSynchronize), ENTRY(cuStreamWaitEvent), ENTRY(cuEventCreate),
    ENTRY(cuEventRecord), ENTRY(cuEventQuery), ENTRY(cuEventSynchronize), ENTRY(cuEventDestroy),
};

int cuGetProcAddress_v2(const char *name, void **call, int version, u64 flags, int *result) {
    (void)version, (void)flags;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!strcmp(calls[i].name, name)) {
            *call = calls[i].call;
            if (result) *result = 0;
            return OK;
        }
    *call = 0;
    if (result) *result = 1;
    return NOT_FOUND;
}
