/* A stand-in for libnvidia-ml.so.1, so that the real Python bindings can be tested without a GPU.
 * NVML_STUB chooses the machine: ok, nopower (a laptop), mig, wsl, mismatch (driver updated, not rebooted), lost.
 * -DMISSING leaves symbols out, as an old driver does. Two devices with different memory and UUIDs. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT = 7, GPU_IS_LOST = 15, MISMATCH = 18 };
typedef struct { int index, mig; } dev;
static dev devices[3] = {{0, 0}, {1, 0}, {0, 1}};
static const char *uuids[3] = {"GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000", "MIG-cccccccc-0000-0000-0000-000000000000"};
static unsigned reads;

static int is(const char *what) { const char *s = getenv("NVML_STUB"); return s ? !strcmp(s, what) : !strcmp("ok", what); }
static int which(dev *d) { return d->mig ? 2 : d->index; }
static unsigned long long mib(unsigned long long n) { return n << 20; }

int nvmlInitWithFlags(unsigned flags) { return is("mismatch") ? MISMATCH : OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int r) { return r == MISMATCH ? "Driver/library version mismatch" : r == NOT_SUPPORTED ? "Not Supported" : "Error"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "550.00"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, dev **d) { if (i > 1) return INVALID; *d = &devices[i]; return OK; }
int nvmlDeviceGetHandleByUUID(const char *u, dev **d) {
    for (int i = 0; i < (is("mig") ? 3 : 2); i++) if (!strcmp(u, uuids[i])) { *d = &devices[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(dev *d, char *s, unsigned n) { snprintf(s, n, "%s", uuids[which(d)]); return OK; }
int nvmlDeviceGetName(dev *d, char *s, unsigned n) { snprintf(s, n, d->index ? "Stub 16 GB" : "Stub 4 GB"); return OK; }
int nvmlDeviceGetUtilizationRates(dev *d, unsigned *u) {
    if (is("mig")) return NOT_SUPPORTED;
    if (is("lost") && reads >= 5) { reads++; return GPU_IS_LOST; }
    unsigned n = reads++ % 10;
    u[0] = n < 7 ? 0 : 36 + n % 6; u[1] = 0; return OK;
}
int nvmlDeviceGetMemoryInfo(dev *d, unsigned long long *m) {   /* total, free, used */
    m[0] = mib(d->mig ? 2048 : d->index ? 16384 : 4096); m[2] = mib(reads % 10 > 7 ? 135 : 3); m[1] = m[0] - m[2]; return OK;
}
int nvmlDeviceGetTemperature(dev *d, int sensor, unsigned *t) { *t = 50 + reads % 10; return OK; }
int nvmlDeviceGetPowerUsage(dev *d, unsigned *mw) { if (is("nopower")) return NOT_SUPPORTED; *mw = 54000; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(dev *d, unsigned *mw) { if (is("nopower")) return NOT_SUPPORTED; *mw = 60000; return OK; }
#ifndef MISSING
int nvmlDeviceGetTotalEnergyConsumption(dev *d, unsigned long long *mj) {
    if (is("nopower") || is("wsl")) return NOT_SUPPORTED;
    *mj = 1000000 + 100ull * reads; return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(dev *d, unsigned long long *r) { *r = reads % 10 > 7 ? 4 | 32 : 1; return OK; }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(dev *d, unsigned long long *r) { *r = 1; return OK; }
int nvmlDeviceGetClockInfo(dev *d, int type, unsigned *mhz) { *mhz = type == 2 ? 6000 : 1485; return OK; }
int nvmlDeviceGetPersistenceMode(dev *d, unsigned *on) { if (is("wsl")) return NOT_SUPPORTED; *on = 1; return OK; }
int nvmlDeviceGetComputeMode(dev *d, unsigned *mode) { *mode = 0; return OK; }

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } proc;
#ifndef MISSING
int nvmlDeviceGetComputeRunningProcesses_v3(dev *d, unsigned *n, proc *p) {
    if (is("nopower")) { *n = 0; return OK; }                        /* a container: its own pid is not there */
    if (!p || *n < 2) { *n = 2; return INSUFFICIENT; }
    *n = 2; p[0].pid = 1; p[0].used = mib(7); p[0].gi = p[0].ci = ~0u;
    p[1].pid = (unsigned)getpid(); p[1].used = is("wsl") ? ~0ull : mib(132); p[1].gi = p[1].ci = ~0u;
    return OK;
}
#endif
