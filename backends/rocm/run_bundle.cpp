// Runs the launches of a bundle of `portattn matrix export` on an AMD chip, or in an emulator that HIP finds.
//   hipcc -O2 run_bundle.cpp -o run_bundle
//   ./run_bundle FOLDER "NAME <MAIL>" [EMULATOR]      writes FOLDER/results.bin, of the cells of this chip
#include <hip/hip_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

static void check(hipError_t status, const std::string& what) {
    if (status == hipSuccess) return;
    fprintf(stderr, "%s: %s\n", what.c_str(), hipGetErrorString(status));
    exit(1);
}

static std::vector<char> read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fprintf(stderr, "%s: cannot be read\n", path.c_str()), exit(2);
    return {std::istreambuf_iterator<char>(file), {}};
}

int main(int argc, char** argv) {
    if (argc < 3) return fprintf(stderr, "usage: run_bundle FOLDER \"NAME <MAIL>\" [EMULATOR]\n"), 2;
    const std::string folder = std::string(argv[1]) + "/";
    hipDeviceProp_t device;
    int runtime = 0, count = 0;
    check(hipGetDeviceProperties(&device, 0), "device 0");
    check(hipRuntimeGetVersion(&runtime), "version");
    const std::string name = device.gcnArchName, arch = name.substr(0, name.find(':'));
    std::ifstream text(folder + "launches.txt");
    std::string word, bundle, cell, wanted, head, memory;
    std::vector<std::pair<char*, size_t>> buffers;
    while (text >> word && word != "end") {
        if (word == "bundle") {
            text >> bundle;
        } else if (word == "cell") {
            size_t bytes;
            text >> cell >> wanted >> bytes;
            if (wanted == arch) head += "cell " + cell + " " + std::to_string(bytes) + "\n", count++;
        } else if (word == "buffer") {
            std::string file;
            size_t bytes;
            text >> file >> bytes;
            const std::vector<char> data = read(folder + file);
            if (wanted != arch) continue;
            if (data.size() != bytes) return fprintf(stderr, "%s: not %zu bytes\n", file.c_str(), bytes), 2;
            buffers.emplace_back(nullptr, bytes);
            check(hipMalloc((void**)&buffers.back().first, bytes), file);
            check(hipMemcpy(buffers.back().first, data.data(), bytes, hipMemcpyHostToDevice), file);
        } else if (word == "launch") {
            std::string code, symbol;
            unsigned x, y, z, threads, lds, number;
            text >> code >> symbol >> x >> y >> z >> threads >> lds >> number;
            std::vector<uint64_t> slots(number + 2, 0);  // two null pointers more: Triton's own scratch memory
            for (unsigned i = 0; i < number; i++) {
                int64_t offset;
                std::string first;
                text >> word >> first >> offset;
                slots[i] = std::stoull(first == "-1" ? "0" : first);
                if (word == "p" && first != "-1" && wanted == arch) slots[i] = (uint64_t)(buffers[slots[i]].first + offset);
            }
            if (wanted != arch) continue;
            std::vector<void*> arguments;
            for (uint64_t& slot : slots) arguments.push_back(&slot);
            hipModule_t module;
            hipFunction_t function;
            check(hipModuleLoadData(&module, read(folder + code).data()), code);
            check(hipModuleGetFunction(&function, module, symbol.c_str()), symbol);
            check(hipModuleLaunchKernel(function, x, y, z, threads, 1, 1, lds, nullptr, arguments.data(), nullptr), symbol);
            check(hipDeviceSynchronize(), cell + " " + symbol);
            check(hipModuleUnload(module), symbol);
        } else if (word == "run") {
            for (auto& [place, bytes] : buffers) {
                std::vector<char> data(bytes);
                check(hipMemcpy(data.data(), place, bytes, hipMemcpyDeviceToHost), cell);
                check(hipFree(place), cell);
                memory.append(data.begin(), data.end());
            }
            buffers.clear();
            fprintf(stderr, "%s\r", cell.c_str());
        }
    }
    char date[32];
    const time_t now = time(nullptr);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    std::ofstream file(folder + "results.part", std::ios::binary);
    file << "portattn-results 1 " << bundle << "\nauthor " << argv[2] << "\ndate " << date << "\ndevice " << name
         << "\nchip " << device.name << "\nruntime " << runtime << "\nmodel " << (argc > 3 ? argv[3] : "") << "\n"
         << head << "end\n" << memory;
    file.close();
    if (!file || rename((folder + "results.part").c_str(), (folder + "results.bin").c_str())) return perror("results"), 2;
    printf("%d cells on %s: send %sresults.bin back\n", count, name.c_str(), folder.c_str());
    return count ? 0 : 3;
}
