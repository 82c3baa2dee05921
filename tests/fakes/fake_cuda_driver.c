/* The driver calls of virtual memory, on host memory, strict about what it is asked. Built by fake_accelerator.py. */
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, MAX_PIECES = 4096, DEVICE = 3 };
static const size_t GRANULE = 1 << 16;

typedef struct { int type, id; } Location;
typedef struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } Flags;
typedef struct { int type, handles; Location location; void *security; Flags flags; } Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { uint64_t address; size_t size; int is_held, is_mapped, is_readable; } Piece;

static Piece pieces[MAX_PIECES];
static int num_pieces;
static size_t limit = SIZE_MAX, used, reserved;

void fake_set_limit(size_t bytes) { limit = bytes; }
size_t fake_used(void) { return used; }
size_t fake_reserved(void) { return reserved; }

static int is_bad(const Properties *p) {
    return p->type != 1 || p->handles != 0 || p->location.type != 1 || p->location.id != DEVICE || p->security ||
           p->flags.compression || p->flags.rdma || p->flags.usage;
}

static void settle(Piece *piece) {
    if (!piece->is_held && !piece->is_mapped && piece->size) {
        used -= piece->size;
        piece->size = 0;
    }
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 102 || device != DEVICE) return INVALID;
    *value = 1;
    return OK;
}

int cuMemGetAllocationGranularity(size_t *granularity, const Properties *p, int option) {
    if (is_bad(p) || option != 0) return INVALID;
    *granularity = GRANULE;
    return OK;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags) {
    if (size == 0 || size % GRANULE || alignment || hint || flags) return INVALID;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *address = (uint64_t)found;
    reserved += size;
    return OK;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    for (int i = 0; i < num_pieces; i++)
        if (pieces[i].is_mapped && pieces[i].address >= address && pieces[i].address < address + size) return INVALID;
    reserved -= size;
    return munmap((void *)address, size) ? INVALID : OK;
}

int cuMemCreate(uint64_t *handle, size_t size, const Properties *p, uint64_t flags) {
    if (size == 0 || size % GRANULE || is_bad(p) || flags || num_pieces == MAX_PIECES) return INVALID;
    if (size > limit || used > limit - size) return OUT_OF_MEMORY;
    pieces[num_pieces] = (Piece){.size = size, .is_held = 1};
    *handle = ++num_pieces;
    used += size;
    return OK;
}

int cuMemRelease(uint64_t handle) {
    Piece *piece = &pieces[handle - 1];
    if (!piece->is_held) return INVALID;
    piece->is_held = 0;
    settle(piece);
    return OK;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    Piece *piece = &pieces[handle - 1];
    if (piece->size != size || piece->is_mapped || offset || flags || address % 4096) return INVALID;
    piece->address = address;
    piece->is_mapped = 1;
    return OK;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    if (count != 1 || access->location.type != 1 || access->location.id != DEVICE || access->flags != 3) return INVALID;
    for (int i = 0; i < num_pieces; i++)
        if (pieces[i].is_mapped && pieces[i].address == address && pieces[i].size == size) {
            pieces[i].is_readable = 1;
            return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID : OK;
        }
    return INVALID;
}

int cuMemUnmap(uint64_t address, size_t size) {
    for (int i = 0; i < num_pieces; i++)
        if (pieces[i].is_mapped && pieces[i].address == address && pieces[i].size == size) {
            pieces[i].is_mapped = 0;
            settle(&pieces[i]);
            mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            return OK;
        }
    return INVALID;
}
