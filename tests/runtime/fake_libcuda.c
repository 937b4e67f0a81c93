/* A stand-in for the CUDA driver's SM partitioning, for wiring tests only: it follows the documented rules of splitting
 * and counts calls, but there is no device behind it, so it says nothing about isolation or speed.
 *
 * FAKE_CUDA_TRACE    a file: a line for each call, "name handle number"; another file starts counting anew
 * FAKE_CUDA_SMS      SMs of the device, 132 by default
 * FAKE_CUDA_FAIL     "name n code": the n-th call of this function returns this error
 * FAKE_CUDA_MISSING  a function that the driver lacks
 * FAKE_CUDA_EXTRA    SMs that a context is granted beyond what was asked for
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 8, SMALLEST = 8 };

struct handle { unsigned sms; };

static unsigned number(const char *name, unsigned otherwise) {
    const char *value = getenv(name);
    return value ? (unsigned)atoi(value) : otherwise;
}

static CUresult called(const char *name, const void *handle, unsigned count) {
    static char seen[256][40];
    static unsigned times[256], names;
    static char traced[512];
    unsigned i = 0, at, code;
    char failing[40];
    const char *path = getenv("FAKE_CUDA_TRACE"), *fail = getenv("FAKE_CUDA_FAIL");
    if (path && strcmp(path, traced)) names = 0, strncpy(traced, path, 511);
    while (i < names && strcmp(seen[i], name)) i++;
    if (i == names) strncpy(seen[names], name, 39), times[names++] = 0;
    times[i]++;
    if (path) {
        FILE *file = fopen(path, "a");
        fprintf(file, "%s %p %u\n", name, handle, count);
        fclose(file);
    }
    if (fail && sscanf(fail, "%39s %u %u", failing, &at, &code) == 3 && !strcmp(failing, name) && times[i] == at)
        return (CUresult)code;
    return CUDA_SUCCESS;
}

static void describe(CUdevResource *resource, unsigned sms) {
    memset(resource, 0, sizeof *resource);
    resource->type = CU_DEV_RESOURCE_TYPE_SM;
    resource->sm.smCount = sms;
    resource->sm.minSmPartitionSize = SMALLEST;
    resource->sm.smCoscheduledAlignment = ALIGNMENT;
}

static CUresult device_get(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : called("cuDeviceGet", NULL, (unsigned)ordinal);
}

static CUresult device_resource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    describe(resource, number("FAKE_CUDA_SMS", 132));
    return called("cuDeviceGetDevResource", NULL, (unsigned)type);
}

static CUresult split(CUdevResource *groups, unsigned *count, const CUdevResource *input, CUdevResource *rest,
                      unsigned flags, unsigned least) {
    unsigned size = least < SMALLEST ? SMALLEST : (least + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    unsigned possible = input->sm.smCount / size, i;
    CUresult result = called("cuDevSmResourceSplitByCount", NULL, least);
    if (result != CUDA_SUCCESS) return result;
    if (!possible) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    if (groups) {
        if (*count < possible) possible = *count;
        for (i = 0; i < possible; i++) describe(&groups[i], size);
    }
    *count = possible;
    if (rest) describe(rest, input->sm.smCount - possible * size);
    return CUDA_SUCCESS;
}

static CUresult describe_set(CUdevResourceDesc *descriptor, CUdevResource *groups, unsigned count) {
    struct handle *made = malloc(sizeof *made);
    made->sms = 0;
    for (unsigned i = 0; i < count; i++) made->sms += groups[i].sm.smCount;
    *descriptor = (CUdevResourceDesc)made;
    return called("cuDevResourceGenerateDesc", made, made->sms);
}

static CUresult context_create(CUgreenCtx *context, CUdevResourceDesc descriptor, CUdevice device, unsigned flags) {
    struct handle *made;
    CUresult result = called("cuGreenCtxCreate", descriptor, flags);
    if (result != CUDA_SUCCESS) return result;
    if (flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
    made = malloc(sizeof *made);
    made->sms = ((struct handle *)descriptor)->sms + number("FAKE_CUDA_EXTRA", 0);
    *context = (CUgreenCtx)made;
    called("+context", made, made->sms);
    return CUDA_SUCCESS;
}

static CUresult context_resource(CUgreenCtx context, CUdevResource *resource, CUdevResourceType type) {
    describe(resource, ((struct handle *)context)->sms);
    return called("cuGreenCtxGetDevResource", context, resource->sm.smCount);
}

static CUresult stream_create(CUstream *stream, CUgreenCtx context, unsigned flags, int priority) {
    CUresult result = called("cuGreenCtxStreamCreate", context, flags);
    if (result != CUDA_SUCCESS) return result;
    if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = (CUstream)malloc(8);
    called("+stream", *stream, 0);
    return CUDA_SUCCESS;
}

static CUresult context_destroy(CUgreenCtx context) { return called("-context", context, 0); }
static CUresult stream_destroy(CUstream stream) { return called("-stream", stream, 0); }
static CUresult stream_synchronize(CUstream stream) { return called("cuStreamSynchronize", stream, 0); }
static CUresult driver_version(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
static CUresult initialise(unsigned flags) { return called("cuInit", NULL, flags); }

static const struct { const char *name; void *function; } TABLE[] = {
    {"cuInit", initialise},
    {"cuDriverGetVersion", driver_version},
    {"cuDeviceGet", device_get},
    {"cuDeviceGetDevResource", device_resource},
    {"cuDevSmResourceSplitByCount", split},
    {"cuDevResourceGenerateDesc", describe_set},
    {"cuGreenCtxCreate", context_create},
    {"cuGreenCtxGetDevResource", context_resource},
    {"cuGreenCtxStreamCreate", stream_create},
    {"cuGreenCtxDestroy", context_destroy},
    {"cuStreamDestroy", stream_destroy},
    {"cuStreamSynchronize", stream_synchronize},
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    const char *missing = getenv("FAKE_CUDA_MISSING");
    if (!strcmp(name, "cuGetProcAddress") || !strcmp(name, "cuGetProcAddress_v2")) {
        *function = (void *)cuGetProcAddress_v2;
        return CUDA_SUCCESS;
    }
    for (unsigned i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
        if (strcmp(TABLE[i].name, name) || (missing && !strcmp(missing, name))) continue;
        *function = TABLE[i].function;
        if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
        return CUDA_SUCCESS;
    }
    *function = NULL;
    if (status) *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
CUresult cuInit(unsigned flags) { return initialise(flags); }
CUresult cuDriverGetVersion(int *version) { return driver_version(version); }
