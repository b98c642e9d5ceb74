// The end of every emulated translation unit: tells the runtime where the kernel is, what its
// arguments hold, and where its static shared memory lies.
#pragma once

#include <emulator/runtime.h>

extern "C" {
extern unsigned char __start_tconv_shared[] __attribute__((visibility("hidden")));
extern unsigned char __stop_tconv_shared[] __attribute__((visibility("hidden")));
}

// Keeps the section in being, and its addresses equal to a GPU's in their low ten bits.
static unsigned char emulator_shared_anchor[16]
    __attribute__((section("tconv_shared"), aligned(1024), used));

// clang-format off: each macro closes what the one before opens.
// Followed by the fields, each as EMULATOR_FIELD(name, kind), and EMULATOR_END.
#define EMULATOR_BEGIN(kernel)                                                               \
    static void emulator_entry(const void* arguments) {                                      \
        kernel(*static_cast<const Arguments*>(arguments));                                   \
    }                                                                                        \
    static constexpr const char* emulator_name = #kernel;                                    \
    static const emulator::Field emulator_fields[] = {

#define EMULATOR_FIELD(name, kind) \
    {#name, __builtin_offsetof(Arguments, name), emulator::FieldKind::kind},

#define EMULATOR_END                                                                         \
    {nullptr, 0, emulator::FieldKind::value}};                                               \
    extern "C" {                                                                             \
    EMULATOR_API extern const emulator::Kernel tconv_emulator_kernel;                        \
    const emulator::Kernel tconv_emulator_kernel = {                                         \
        emulator_name,       emulator_entry,    __start_tconv_shared,                        \
        __stop_tconv_shared, sizeof(Arguments),                                              \
        sizeof emulator_fields / sizeof(emulator::Field) - 1,                                \
        emulator_fields};                                                                    \
    }
// clang-format on
