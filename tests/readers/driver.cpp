// Reads messages from the standard input (count of parts, then length and bytes of each) and prints what they hold.
#include <cstdio>
#include <iostream>
#include <iterator>

#include "sam3_masks.hpp"

static uint32_t crc32(const std::vector<uint8_t>& data) {
    uint32_t crc = ~0u;
    for (uint8_t byte : data) {
        crc ^= byte;
        for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static std::string str(std::string_view text) { return std::string(text); }

static void print_masks(const std::vector<std::string_view>& parts) {
    const sam3::MaskMessage message = sam3::parse_masks(parts);
    std::printf("masks %s %s %lld %lld %lld %lld %lldx%lld %lld %lld %s\n", str(message.camera).c_str(),
                str(message.clock).c_str(), (long long)message.seq, (long long)message.capture_ns,
                (long long)message.received_ns, (long long)message.published_ns, (long long)message.width,
                (long long)message.height, (long long)message.skipped, (long long)message.epoch.value_or(-1),
                str(message.model).c_str());
    for (const sam3::Instance& instance : message.instances)
        std::printf("instance %lld %s %s %.6f %.6f %d %lld %lld %lld [%lld %lld %lld %lld] %08x\n",
                    (long long)instance.id, str(instance.label).c_str(), str(instance.state).c_str(), instance.score,
                    instance.confidence.value_or(-1), instance.doubtful, (long long)instance.area,
                    (long long)instance.age, (long long)instance.frames_since_seen, (long long)instance.box[0],
                    (long long)instance.box[1], (long long)instance.box[2], (long long)instance.box[3],
                    crc32(sam3::decode_mask(instance.mask)));
}

static void print_frame(const std::vector<std::string_view>& parts) {
    const sam3::Frame frame = sam3::parse_frame(parts);
    std::printf("frame %s %s %lld %lld %lld %lldx%lld %s %zu\n", str(frame.camera).c_str(), str(frame.clock).c_str(),
                (long long)frame.seq, (long long)frame.capture_ns, (long long)frame.sent_ns, (long long)frame.width,
                (long long)frame.height, str(frame.encoding).c_str(), frame.colour.size());
    if (frame.depth)
        std::printf("depth %lldx%lld %s %.6f %d %zu\n", (long long)frame.depth->width, (long long)frame.depth->height,
                    str(frame.depth->encoding).c_str(), frame.depth->scale_m, frame.depth->aligned,
                    frame.depth->data.size());
}

int main() {
    const std::string data{std::istreambuf_iterator<char>(std::cin), {}};
    size_t place = 0;
    auto number = [&] {
        uint32_t value;
        std::memcpy(&value, &data.at(place), 4);
        place += 4;
        return value;
    };
    while (place < data.size()) {
        std::vector<std::string_view> parts(number());
        for (std::string_view& part : parts) {
            const uint32_t length = number();
            part = std::string_view(data).substr(place, length);
            place += length;
        }
        try {
            parts[0].substr(0, 6) == "frame/" ? print_frame(parts) : print_masks(parts);
        } catch (const sam3::Error& error) {
            std::printf("error %s\n", error.what());
        }
    }
}
