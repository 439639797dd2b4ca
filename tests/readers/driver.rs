//! Reads messages from the standard input (count of parts, then length and bytes of each) and prints what they hold.
use std::io::Read;

#[path = "../../tools/readers/sam3_masks.rs"]
mod sam3_masks;

use sam3_masks::{decode_mask, parse_frame, parse_masks, Result};

fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb88320 } else { 0 })
    })
}

fn print_masks(parts: &[&[u8]]) -> Result<()> {
    let m = parse_masks(parts)?;
    println!(
        "masks {} {} {} {} {} {} {}x{} {} {} {}",
        m.camera, m.clock, m.seq, m.capture_ns, m.received_ns, m.published_ns, m.width, m.height, m.skipped,
        m.epoch.unwrap_or(-1), m.model
    );
    for i in &m.instances {
        let [x0, y0, x1, y1] = i.bounds;
        println!(
            "instance {} {} {} {:.6} {:.6} {} {} {} {} [{x0} {y0} {x1} {y1}] {:08x}",
            i.id, i.label, i.state, i.score, i.confidence.unwrap_or(-1.0), i32::from(i.doubtful), i.area, i.age,
            i.frames_since_seen, crc32(&decode_mask(&i.mask)?)
        );
    }
    Ok(())
}

fn print_frame(parts: &[&[u8]]) -> Result<()> {
    let f = parse_frame(parts)?;
    println!(
        "frame {} {} {} {} {} {}x{} {} {}",
        f.camera, f.clock, f.seq, f.capture_ns, f.sent_ns, f.width, f.height, f.encoding, f.colour.len()
    );
    if let Some(d) = &f.depth {
        println!(
            "depth {}x{} {} {:.6} {} {}",
            d.width, d.height, d.encoding, d.scale_m, i32::from(d.aligned), d.data.len()
        );
    }
    Ok(())
}

fn main() {
    let mut data = Vec::new();
    std::io::stdin().read_to_end(&mut data).unwrap();
    let mut rest: &[u8] = &data;
    while !rest.is_empty() {
        let mut take = |count: usize| {
            let (taken, left) = rest.split_at(count);
            rest = left;
            taken
        };
        let count = u32::from_le_bytes(take(4).try_into().unwrap()) as usize;
        let mut parts = Vec::new();
        for _ in 0..count {
            let length = u32::from_le_bytes(take(4).try_into().unwrap()) as usize;
            parts.push(take(length));
        }
        let result = if parts[0].starts_with(b"frame/") { print_frame(&parts) } else { print_masks(&parts) };
        if let Err(error) = result {
            println!("error {}", error.0);
        }
    }
}
