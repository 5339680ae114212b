// A plugin of qemu-user: how often each block of instructions was executed. At the end of the process the file named by
// the argument out= has a line for each: address, times, and the instructions as hexadecimal bytes.
//
//   qemu-aarch64 -plugin libexecuted_blocks.so,out=FILE PROGRAM
//
// What it uses of QEMU's interface for plugins, version 1, is declared here: Debian's packages have no header.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t                qemu_plugin_id_t;
typedef struct qemu_info_t      qemu_info_t;
typedef struct qemu_plugin_tb   qemu_plugin_tb;
typedef struct qemu_plugin_insn qemu_plugin_insn;

enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };

typedef void (*tb_callback)(qemu_plugin_id_t id, qemu_plugin_tb * tb);
typedef void (*data_callback)(qemu_plugin_id_t id, void * data);

void     qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, tb_callback cb);
void     qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb * tb, enum qemu_plugin_op op, void * at, uint64_t n);
void     qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, data_callback cb, void * data);
size_t   qemu_plugin_tb_n_insns(const qemu_plugin_tb * tb);
uint64_t qemu_plugin_tb_vaddr(const qemu_plugin_tb * tb);
qemu_plugin_insn * qemu_plugin_tb_get_insn(const qemu_plugin_tb * tb, size_t i);
const void *       qemu_plugin_insn_data(const qemu_plugin_insn * insn);
size_t             qemu_plugin_insn_size(const qemu_plugin_insn * insn);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

struct block {
    uint64_t       times;
    uint64_t       address;
    char *         hex;
    struct block * next;
};

// A program on one thread is translated by one.
static struct block * blocks;
static char           out[4096];

static void translate(qemu_plugin_id_t id, qemu_plugin_tb * tb) {
    (void)id;
    const size_t   n = qemu_plugin_tb_n_insns(tb);
    struct block * b = calloc(1, sizeof(*b));
    b->address       = qemu_plugin_tb_vaddr(tb);
    b->hex           = malloc(n * 9 + 1);
    char * to        = b->hex;
    for (size_t i = 0; i < n; i++) {
        const qemu_plugin_insn * insn  = qemu_plugin_tb_get_insn(tb, i);
        const uint8_t *          bytes = qemu_plugin_insn_data(insn);
        for (size_t j = 0; j < qemu_plugin_insn_size(insn); j++) {
            to += sprintf(to, "%02x", bytes[j]);
        }
        *to++ = ' ';
    }
    *to     = 0;
    b->next = blocks;
    blocks  = b;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &b->times, 1);
}

static void write_blocks(qemu_plugin_id_t id, void * data) {
    (void)id;
    (void)data;
    FILE * f = fopen(out, "w");
    for (struct block * b = blocks; f && b; b = b->next) {
        fprintf(f, "%llx %llu %s\n", (unsigned long long)b->address, (unsigned long long)b->times, b->hex);
    }
    if (f) {
        fclose(f);
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t * info, int argc,
                                                               char ** argv) {
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "out=", 4) == 0) {
            snprintf(out, sizeof(out), "%s", argv[i] + 4);
        }
    }
    if (!out[0]) {
        fprintf(stderr, "executed_blocks: name the file for the counts, as ...,out=FILE\n");
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_atexit_cb(id, write_blocks, NULL);
    return 0;
}
