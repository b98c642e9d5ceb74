// wgmma's operand lists for every N, which `asm` needs written out. Only for <ptx/wgmma.cuh>.
#pragma once

// "%0, %1, ..." of N/2 accumulators, and the accumulators themselves.
#define TCONV_D8 "%0, %1, %2, %3"
#define TCONV_D16 TCONV_D8 ", %4, %5, %6, %7"
#define TCONV_D24 TCONV_D16 ", %8, %9, %10, %11"
#define TCONV_D32 TCONV_D24 ", %12, %13, %14, %15"
#define TCONV_D40 TCONV_D32 ", %16, %17, %18, %19"
#define TCONV_D48 TCONV_D40 ", %20, %21, %22, %23"
#define TCONV_D56 TCONV_D48 ", %24, %25, %26, %27"
#define TCONV_D64 TCONV_D56 ", %28, %29, %30, %31"
#define TCONV_D72 TCONV_D64 ", %32, %33, %34, %35"
#define TCONV_D80 TCONV_D72 ", %36, %37, %38, %39"
#define TCONV_D88 TCONV_D80 ", %40, %41, %42, %43"
#define TCONV_D96 TCONV_D88 ", %44, %45, %46, %47"
#define TCONV_D104 TCONV_D96 ", %48, %49, %50, %51"
#define TCONV_D112 TCONV_D104 ", %52, %53, %54, %55"
#define TCONV_D120 TCONV_D112 ", %56, %57, %58, %59"
#define TCONV_D128 TCONV_D120 ", %60, %61, %62, %63"
#define TCONV_D136 TCONV_D128 ", %64, %65, %66, %67"
#define TCONV_D144 TCONV_D136 ", %68, %69, %70, %71"
#define TCONV_D152 TCONV_D144 ", %72, %73, %74, %75"
#define TCONV_D160 TCONV_D152 ", %76, %77, %78, %79"
#define TCONV_D168 TCONV_D160 ", %80, %81, %82, %83"
#define TCONV_D176 TCONV_D168 ", %84, %85, %86, %87"
#define TCONV_D184 TCONV_D176 ", %88, %89, %90, %91"
#define TCONV_D192 TCONV_D184 ", %92, %93, %94, %95"
#define TCONV_D200 TCONV_D192 ", %96, %97, %98, %99"
#define TCONV_D208 TCONV_D200 ", %100, %101, %102, %103"
#define TCONV_D216 TCONV_D208 ", %104, %105, %106, %107"
#define TCONV_D224 TCONV_D216 ", %108, %109, %110, %111"
#define TCONV_D232 TCONV_D224 ", %112, %113, %114, %115"
#define TCONV_D240 TCONV_D232 ", %116, %117, %118, %119"
#define TCONV_D248 TCONV_D240 ", %120, %121, %122, %123"
#define TCONV_D256 TCONV_D248 ", %124, %125, %126, %127"

#define TCONV_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TCONV_O8 TCONV_FOUR(0)
#define TCONV_O16 TCONV_O8, TCONV_FOUR(4)
#define TCONV_O24 TCONV_O16, TCONV_FOUR(8)
#define TCONV_O32 TCONV_O24, TCONV_FOUR(12)
#define TCONV_O40 TCONV_O32, TCONV_FOUR(16)
#define TCONV_O48 TCONV_O40, TCONV_FOUR(20)
#define TCONV_O56 TCONV_O48, TCONV_FOUR(24)
#define TCONV_O64 TCONV_O56, TCONV_FOUR(28)
#define TCONV_O72 TCONV_O64, TCONV_FOUR(32)
#define TCONV_O80 TCONV_O72, TCONV_FOUR(36)
#define TCONV_O88 TCONV_O80, TCONV_FOUR(40)
#define TCONV_O96 TCONV_O88, TCONV_FOUR(44)
#define TCONV_O104 TCONV_O96, TCONV_FOUR(48)
#define TCONV_O112 TCONV_O104, TCONV_FOUR(52)
#define TCONV_O120 TCONV_O112, TCONV_FOUR(56)
#define TCONV_O128 TCONV_O120, TCONV_FOUR(60)
#define TCONV_O136 TCONV_O128, TCONV_FOUR(64)
#define TCONV_O144 TCONV_O136, TCONV_FOUR(68)
#define TCONV_O152 TCONV_O144, TCONV_FOUR(72)
#define TCONV_O160 TCONV_O152, TCONV_FOUR(76)
#define TCONV_O168 TCONV_O160, TCONV_FOUR(80)
#define TCONV_O176 TCONV_O168, TCONV_FOUR(84)
#define TCONV_O184 TCONV_O176, TCONV_FOUR(88)
#define TCONV_O192 TCONV_O184, TCONV_FOUR(92)
#define TCONV_O200 TCONV_O192, TCONV_FOUR(96)
#define TCONV_O208 TCONV_O200, TCONV_FOUR(100)
#define TCONV_O216 TCONV_O208, TCONV_FOUR(104)
#define TCONV_O224 TCONV_O216, TCONV_FOUR(108)
#define TCONV_O232 TCONV_O224, TCONV_FOUR(112)
#define TCONV_O240 TCONV_O232, TCONV_FOUR(116)
#define TCONV_O248 TCONV_O240, TCONV_FOUR(120)
#define TCONV_O256 TCONV_O248, TCONV_FOUR(124)

// X(N, placeholders, (operands), and the numbers of the six operands that follow them)
#define TCONV_FOR_EACH_N(X)                                                          \
    X(8, TCONV_D8, (TCONV_O8), "%4", "%5", "%6", "%7", "%8", "%9")                   \
    X(16, TCONV_D16, (TCONV_O16), "%8", "%9", "%10", "%11", "%12", "%13")            \
    X(24, TCONV_D24, (TCONV_O24), "%12", "%13", "%14", "%15", "%16", "%17")          \
    X(32, TCONV_D32, (TCONV_O32), "%16", "%17", "%18", "%19", "%20", "%21")          \
    X(40, TCONV_D40, (TCONV_O40), "%20", "%21", "%22", "%23", "%24", "%25")          \
    X(48, TCONV_D48, (TCONV_O48), "%24", "%25", "%26", "%27", "%28", "%29")          \
    X(56, TCONV_D56, (TCONV_O56), "%28", "%29", "%30", "%31", "%32", "%33")          \
    X(64, TCONV_D64, (TCONV_O64), "%32", "%33", "%34", "%35", "%36", "%37")          \
    X(72, TCONV_D72, (TCONV_O72), "%36", "%37", "%38", "%39", "%40", "%41")          \
    X(80, TCONV_D80, (TCONV_O80), "%40", "%41", "%42", "%43", "%44", "%45")          \
    X(88, TCONV_D88, (TCONV_O88), "%44", "%45", "%46", "%47", "%48", "%49")          \
    X(96, TCONV_D96, (TCONV_O96), "%48", "%49", "%50", "%51", "%52", "%53")          \
    X(104, TCONV_D104, (TCONV_O104), "%52", "%53", "%54", "%55", "%56", "%57")       \
    X(112, TCONV_D112, (TCONV_O112), "%56", "%57", "%58", "%59", "%60", "%61")       \
    X(120, TCONV_D120, (TCONV_O120), "%60", "%61", "%62", "%63", "%64", "%65")       \
    X(128, TCONV_D128, (TCONV_O128), "%64", "%65", "%66", "%67", "%68", "%69")       \
    X(136, TCONV_D136, (TCONV_O136), "%68", "%69", "%70", "%71", "%72", "%73")       \
    X(144, TCONV_D144, (TCONV_O144), "%72", "%73", "%74", "%75", "%76", "%77")       \
    X(152, TCONV_D152, (TCONV_O152), "%76", "%77", "%78", "%79", "%80", "%81")       \
    X(160, TCONV_D160, (TCONV_O160), "%80", "%81", "%82", "%83", "%84", "%85")       \
    X(168, TCONV_D168, (TCONV_O168), "%84", "%85", "%86", "%87", "%88", "%89")       \
    X(176, TCONV_D176, (TCONV_O176), "%88", "%89", "%90", "%91", "%92", "%93")       \
    X(184, TCONV_D184, (TCONV_O184), "%92", "%93", "%94", "%95", "%96", "%97")       \
    X(192, TCONV_D192, (TCONV_O192), "%96", "%97", "%98", "%99", "%100", "%101")     \
    X(200, TCONV_D200, (TCONV_O200), "%100", "%101", "%102", "%103", "%104", "%105") \
    X(208, TCONV_D208, (TCONV_O208), "%104", "%105", "%106", "%107", "%108", "%109") \
    X(216, TCONV_D216, (TCONV_O216), "%108", "%109", "%110", "%111", "%112", "%113") \
    X(224, TCONV_D224, (TCONV_O224), "%112", "%113", "%114", "%115", "%116", "%117") \
    X(232, TCONV_D232, (TCONV_O232), "%116", "%117", "%118", "%119", "%120", "%121") \
    X(240, TCONV_D240, (TCONV_O240), "%120", "%121", "%122", "%123", "%124", "%125") \
    X(248, TCONV_D248, (TCONV_O248), "%124", "%125", "%126", "%127", "%128", "%129") \
    X(256, TCONV_D256, (TCONV_O256), "%128", "%129", "%130", "%131", "%132", "%133")
