// Files of cpp_port.cpp: JSON, config.toml, .npy arrays and the golden folder (docs/formats.md). Every size that a file
// states is checked against the file before memory is taken for it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

using std::array, std::map, std::pair, std::size_t, std::string, std::to_string, std::vector;
using Floats = vector<float>;
using Word = uint64_t;

[[noreturn]] void fail(const string& message) {
    std::cerr << "cpp_port: " << message << "\n";
    std::exit(2);
}
void require(bool condition, const string& message) {
    if (!condition) fail(message);
}

const size_t MAX_FILE = 64 << 20;   // bytes
const size_t MAX_COUNT = 16 << 20;  // elements of one value
const int MAX_DEPTH = 32;           // of JSON

string read_file(const string& path) {
    std::error_code error;
    require(std::filesystem::is_regular_file(path, error), path + " is missing or no regular file");
    size_t size = std::filesystem::file_size(path, error);
    require(!error && size <= MAX_FILE, path + " has more than 64 MiB or no size");
    string bytes(size, '\0');
    std::ifstream file(path, std::ios::binary);
    file.read(&bytes[0], (std::streamsize)size);
    require((bool)file, "cannot read " + path);
    return bytes;
}
template <class T> T get(const char* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}
template <class T> void put(string& bytes, T value) { bytes.append((const char*)&value, sizeof value); }
float from_bits(uint32_t bits) { return get<float>((const char*)&bits); }

// A number stays text until it is used: a double would lose bits of 64-bit integers.
struct Json {
    string text;          // of a number, a string, true, false or null
    vector<string> keys;  // of an object
    vector<Json> items;   // of an object or a list

    const Json& operator[](const string& key) const {
        size_t i = (size_t)(std::find(keys.begin(), keys.end(), key) - keys.begin());
        require(i < keys.size(), "JSON lacks the field " + key);
        return items[i];
    }
    double number() const { return std::stod(text); }
    Word whole(Word limit = UINT64_MAX) const {
        const string largest = to_string(limit);
        bool digits = !text.empty() && text.find_first_not_of("0123456789") == string::npos;
        bool small = text.size() < largest.size() || (text.size() == largest.size() && text <= largest);
        require(digits && small, "JSON has no whole number from 0 to " + largest + " where one is needed");
        return std::strtoull(text.c_str(), nullptr, 10);
    }
};

// Reads one value. Commas and colons count as blanks; the files that need a strict reader have one in Python.
struct JsonReader {
    const char *at, *end;

    void skip() {
        while (at < end && std::strchr(" \t\r\n,:", *at)) at++;
        require(at < end, "JSON ends too early");
    }
    string quoted() {
        const char* first = ++at;
        for (; at < end && *at != '"'; at++) require(*at != '\\', "JSON has an escape, which this port does not read");
        require(at < end, "JSON ends too early");
        at++;
        return string(first, at - 1);
    }
    Json value(int depth = 0) {
        Json json;
        require(depth < MAX_DEPTH, "JSON is nested too deeply");
        skip();
        if (*at == '{' || *at == '[') {
            char close = *at++ == '{' ? '}' : ']';
            for (skip(); *at != close; skip()) {
                if (close == '}') json.keys.push_back(value(depth + 1).text);
                json.items.push_back(value(depth + 1));
            }
            at++;
        } else if (*at == '"') {
            json.text = quoted();
        } else {
            while (at < end && !std::strchr(",:[]{}\" \t\r\n", *at)) json.text += *at++;
            require(!json.text.empty(), "JSON has a bracket too many");
        }
        return json;
    }
};
Json parse_json(const string& text) {
    require(text.find('\0') == string::npos, "JSON has a byte of zero");
    return JsonReader{text.data(), text.data() + text.size()}.value();
}

// config.toml: the lines section.key = number, or a list of numbers. Other lines are of no use here.
struct Config {
    map<string, vector<double>> settings;

    explicit Config(const string& path) {
        std::istringstream lines(read_file(path));
        for (string line; std::getline(lines, line);) {
            for (char& c : line)
                if (c == '[' || c == ']' || c == ',') c = ' ';
            std::istringstream words(line);
            string key, equals;
            words >> key >> equals;
            for (double number; words >> number;) settings[key].push_back(number);
        }
    }
    const vector<double>& list(const string& key) const {
        auto found = settings.find(key);
        if (found == settings.end()) fail("config.toml lacks numbers for " + key);
        return found->second;
    }
    double number(const string& key) const { return list(key)[0]; }
    size_t whole(const string& key, double limit = 4096) const {
        double value = number(key);
        require(value >= 1 && value <= limit && value == std::floor(value), key + " is out of range");
        return (size_t)value;
    }
};

// An array in fp32, or in bf16 that is stored as 16-bit words. Who uses the array checks its size.
Floats read_npy(const string& bytes, const string& what) {
    require(bytes.size() >= 10 && bytes.compare(0, 6, "\x93NUMPY") == 0, what + " is not a .npy file");
    size_t start = 10 + get<uint16_t>(&bytes[8]);
    const string header = bytes.substr(10, start - 10);
    bool fp32 = header.find("'<f4'") != string::npos, bf16 = header.find("'<u2'") != string::npos;
    require(fp32 != bf16, what + " is neither in fp32 nor in bf16");
    require(bytes.size() > start, what + " is cut off");
    size_t width = fp32 ? 4 : 2, count = (bytes.size() - start) / width;
    Floats values(count);
    for (size_t i = 0; i < count; i++) {
        const char* at = &bytes[start + width * i];
        values[i] = fp32 ? get<float>(at) : from_bits((uint32_t)get<uint16_t>(at) << 16);
    }
    return values;
}

// The golden folder, and the values that this port computes. A value's shape and dtype come from index.json.
struct Golden {
    Json index;
    vector<string> parameters;
    map<string, const Json*> entries;
    map<string, Floats> given;
    map<string, string> computed;  // the bytes of a value, in its dtype

    explicit Golden(const string& folder) : index(parse_json(read_file(folder + "/index.json"))) {
        for (auto& name : index["parameters"].items) parameters.push_back(name.text);
        for (auto& entry : index["values"].items) entries[entry["name"].text] = &entry;
        const string path = folder + "/golden.safetensors", file = read_file(path);
        require(file.size() >= 8 && get<Word>(&file[0]) <= file.size() - 8, path + " is cut off");
        size_t start = 8 + get<Word>(&file[0]);
        const Json header = parse_json(file.substr(8, start - 8));
        for (auto& [name, entry] : entries) {
            bool fed = name == "bf16.rms_norm.input";  // computed, but also fed to bf16.rms_norm
            bool given = (*entry)["given"].text == "true" && (*entry)["dtype"].text == "fp32";
            if (given || fed) read_given(name, header[name], file, start);
        }
    }
    void read_given(const string& name, const Json& place, const string& file, size_t start) {
        const string what = "golden.safetensors: " + name, &dtype = place["dtype"].text;
        const vector<Json>& offsets = place["data_offsets"].items;
        require(dtype == "F32", what + " is not F32");
        require(offsets.size() == 2, what + " has no two offsets");
        size_t count = elements(name);
        size_t last = offsets[1].whole(file.size() - start), first = offsets[0].whole(last);
        require(last - first == count * 4, what + " does not have the size that index.json gives");
        Floats& values = given[name];
        for (size_t i = 0; i < count; i++) values.push_back(get<float>(&file[start + first + 4 * i]));
    }
    bool has(const string& name) const { return entries.count(name) > 0; }
    const Json& entry(const string& name) const {
        require(has(name), "index.json lacks " + name);
        return *entries.at(name);
    }
    const Json& inputs(const string& name) const { return entry(name)["inputs"]; }
    Word input(const string& name, const string& key) const { return inputs(name)[key].whole(); }
    const Floats& read(const string& name) const {
        require(given.count(name), "index.json does not call " + name + " given");
        return given.at(name);
    }
    vector<size_t> shape(const string& name, size_t dimensions = 0) const {  // 0: any number of dimensions
        vector<size_t> sizes;
        for (auto& size : entry(name)["shape"].items) sizes.push_back(size.whole(MAX_COUNT));
        bool empty = std::count(sizes.begin(), sizes.end(), size_t(0)) > 0;
        require(!empty && (!dimensions || sizes.size() == dimensions), "index.json: bad shape of " + name);
        return sizes;
    }
    size_t elements(const string& name) const {
        size_t count = 1;
        for (size_t size : shape(name)) {
            count *= size;
            require(count <= MAX_COUNT, "index.json: " + name + " is too large");
        }
        return count;
    }
    // Appends to a computed value, so a batch may be noted sample by sample. Names that index.json lacks are ignored.
    template <class List> auto note(const string& name, const List& values) -> decltype(values.begin(), void()) {
        if (!has(name)) return;
        string &bytes = computed[name], dtype = entry(name)["dtype"].text;
        for (auto value : values) {
            if (dtype == "fp32" || dtype == "bf16") put(bytes, (float)value);
            else if (dtype == "bool") put(bytes, (uint8_t)value);
            else put(bytes, (Word)value);
        }
    }
    void note(const string& name, double value) { note(name, array<double, 1>{value}); }

    // Writes a safetensors file. It gets its name when it is complete, so that no half file is taken for a whole one.
    void write(const string& path) const {
        static const map<string, pair<string, size_t>> dtypes = {
            {"fp32", {"F32", 4}}, {"bf16", {"F32", 4}}, {"bool", {"BOOL", 1}},
            {"int64", {"U64", 8}}, {"uint64", {"U64", 8}}};
        string header = "{", data, length;
        for (auto& [name, bytes] : computed) {
            auto [dtype, width] = dtypes.at(entry(name)["dtype"].text);
            require(bytes.size() == width * elements(name), name + " does not have the shape that index.json gives");
            string sizes;
            for (size_t size : shape(name)) sizes += (sizes.empty() ? "" : ",") + to_string(size);
            header += '"' + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + sizes + "],\"data_offsets\":["
                      + to_string(data.size()) + "," + to_string(data.size() + bytes.size()) + "]},";
            data += bytes;
        }
        header.back() = '}';
        header.resize((header.size() + 7) / 8 * 8, ' ');
        put(length, (Word)header.size());
        const string part = path + ".part";
        std::error_code error;
        std::ofstream file(part, std::ios::binary);
        file << length << header << data;
        file.close();
        if (file) std::filesystem::rename(part, path, error);
        if (file && !error) return;
        std::filesystem::remove(part, error);
        fail("cannot write " + path);
    }
};
