//! Reader of sam3_node's messages of frames and masks, wire version 1. Copy this file; link with zstd.
//!
//! `parse_masks` and `parse_frame` take the parts of a ZeroMQ message; `decode_mask` gives a mask's pixels. Other or
//! damaged data give an `Error`. Text and bytes in the results borrow from the parts. Licence: Apache-2.0.
#![allow(dead_code)]
use std::ffi::c_void;

extern "C" {
    fn ZSTD_decompress(to: *mut c_void, capacity: usize, from: *const c_void, size: usize) -> usize;
    fn ZSTD_getFrameContentSize(from: *const c_void, size: usize) -> u64;
    fn ZSTD_isError(code: usize) -> u32;
}

#[derive(Debug)]
pub struct Error(pub String);

pub type Result<T> = std::result::Result<T, Error>;

fn wrong<T>(expected: &str) -> Result<T> { Err(Error(format!("expected {expected}"))) }

fn require(holds: bool, expected: &str) -> Result<()> { if holds { Ok(()) } else { wrong(expected) } }

// MessagePack

#[derive(Debug, Clone)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    Integer(i64),
    Number(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    List(Vec<Value<'a>>),
    Map(Vec<(Value<'a>, Value<'a>)>),
}

impl<'a> Value<'a> {
    pub fn find(&self, key: &str) -> Option<&Value<'a>> {
        let Value::Map(items) = self else { return None };
        let item = items.iter().find(|(name, _)| matches!(name, Value::Text(text) if *text == key))?;
        Some(&item.1).filter(|value| !matches!(value, Value::Nil))
    }
    pub fn at(&self, key: &str) -> Result<&Value<'a>> { self.find(key).map_or_else(|| wrong(key), Ok) }
    pub fn integer(&self) -> Result<i64> { if let Value::Integer(v) = self { Ok(*v) } else { wrong("an integer") } }
    pub fn number(&self) -> Result<f64> {
        if let Value::Number(v) = self { Ok(*v) } else { Ok(self.integer()? as f64) }
    }
    pub fn bool(&self) -> Result<bool> { if let Value::Bool(v) = self { Ok(*v) } else { wrong("true or false") } }
    pub fn text(&self) -> Result<&'a str> { if let Value::Text(v) = self { Ok(v) } else { wrong("text") } }
    pub fn bytes(&self) -> Result<&'a [u8]> { if let Value::Bytes(v) = self { Ok(v) } else { wrong("bytes") } }
    pub fn list(&self) -> Result<&[Value<'a>]> { if let Value::List(v) = self { Ok(v) } else { wrong("a list") } }
    fn integers<const N: usize>(&self) -> Result<[i64; N]> {
        let found: Vec<i64> = self.list()?.iter().map(Value::integer).collect::<Result<_>>()?;
        found.try_into().or_else(|_| wrong("a list of another length"))
    }
}

/// Unpack one MessagePack object without extensions.
pub fn unpack(mut data: &[u8]) -> Result<Value<'_>> {
    let value = read(&mut data, 0)?;
    require(data.is_empty(), "one MessagePack object, found more bytes").map(|()| value)
}

fn take<'a>(data: &mut &'a [u8], count: u64) -> Result<&'a [u8]> {
    require(count <= data.len() as u64, "MessagePack, found its end too early")?;
    let taken;
    (taken, *data) = data.split_at(count as usize);
    Ok(taken)
}

fn big_endian(data: &mut &[u8], bytes: u64) -> Result<u64> {
    Ok(take(data, bytes)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn text<'a>(data: &mut &'a [u8], count: u64) -> Result<Value<'a>> {
    std::str::from_utf8(take(data, count)?).map(Value::Text).or_else(|_| wrong("UTF-8"))
}

fn list<'a>(data: &mut &'a [u8], count: u64, depth: u32) -> Result<Value<'a>> {
    Ok(Value::List((0..count).map(|_| read(data, depth + 1)).collect::<Result<_>>()?))
}

fn map<'a>(data: &mut &'a [u8], count: u64, depth: u32) -> Result<Value<'a>> {
    Ok(Value::Map((0..count).map(|_| Ok((read(data, depth + 1)?, read(data, depth + 1)?))).collect::<Result<_>>()?))
}

fn read<'a>(data: &mut &'a [u8], depth: u32) -> Result<Value<'a>> {
    require(depth < 32, "MessagePack of at most 32 levels")?;
    let head = take(data, 1)?[0];
    Ok(match head {
        0x00..=0x7f => Value::Integer(i64::from(head)),
        0x80..=0x8f => map(data, u64::from(head & 15), depth)?,
        0x90..=0x9f => list(data, u64::from(head & 15), depth)?,
        0xa0..=0xbf => text(data, u64::from(head & 31))?,
        0xc0 => Value::Nil,
        0xc2 | 0xc3 => Value::Bool(head == 0xc3),
        0xc4..=0xc6 => { let count = big_endian(data, 1 << (head - 0xc4))?; Value::Bytes(take(data, count)?) }
        0xca => Value::Number(f64::from(f32::from_bits(big_endian(data, 4)? as u32))),
        0xcb => Value::Number(f64::from_bits(big_endian(data, 8)?)),
        0xcc..=0xcf => Value::Integer(big_endian(data, 1 << (head - 0xcc))? as i64),
        0xd0 => Value::Integer(i64::from(big_endian(data, 1)? as i8)),
        0xd1 => Value::Integer(i64::from(big_endian(data, 2)? as i16)),
        0xd2 => Value::Integer(i64::from(big_endian(data, 4)? as i32)),
        0xd3 => Value::Integer(big_endian(data, 8)? as i64),
        0xd9..=0xdb => { let count = big_endian(data, 1 << (head - 0xd9))?; text(data, count)? }
        0xdc | 0xdd => { let count = big_endian(data, 2 << (head - 0xdc))?; list(data, count, depth)? }
        0xde | 0xdf => { let count = big_endian(data, 2 << (head - 0xde))?; map(data, count, depth)? }
        0xe0..=0xff => Value::Integer(i64::from(head as i8)),
        _ => return wrong("MessagePack without extensions"),
    })
}

// Masks
#[derive(Debug, Clone)]
pub struct Mask<'a> { pub encoding: &'a str, pub data: &'a [u8], pub size: [usize; 2], pub bounds: [usize; 4] }

#[derive(Debug, Clone)]
pub struct Instance<'a> {
    pub id: i64, pub label: &'a str, pub score: f64, pub bounds: [i64; 4], pub area: i64, pub state: &'a str,
    pub age: i64, pub frames_since_seen: i64, pub confidence: Option<f64>, pub doubtful: bool, pub mask: Mask<'a>,
    /// All fields, with the optional ones: position_m and others.
    pub fields: Value<'a>,
}

#[derive(Debug, Clone)]
pub struct MaskMessage<'a> {
    pub camera: &'a str, pub clock: &'a str, pub node: &'a str, pub model: &'a str, pub seq: i64, pub capture_ns: i64,
    pub received_ns: i64, pub published_ns: i64, pub width: i64, pub height: i64, pub skipped: i64,
    /// Ids begin again with another one.
    pub epoch: Option<i64>,
    pub instances: Vec<Instance<'a>>,
}

fn unpack_body<'a>(parts: &[&'a [u8]], root: &str, kind: &str) -> Result<Value<'a>> {
    require(parts.len() >= 2, "a topic and a body")?;
    let body = unpack(parts[1])?;
    require(body.at("v")?.integer()? == 1 && body.at("kind")?.text()? == kind, "another kind or version of message")?;
    require(parts[0] == format!("{root}{}", body.at("camera")?.text()?).as_bytes(), "the topic of the camera")?;
    Ok(body)
}

fn parse_mask<'a>(map: &Value<'a>) -> Result<Mask<'a>> {
    let ([height, width], [x0, y0, x1, y1]) = (map.at("size")?.integers()?, map.at("box")?.integers()?);
    require((1..=16384).contains(&height) && (1..=16384).contains(&width), "a mask of 1 to 16384 pixels a side")?;
    require(0 <= x0 && x0 <= x1 && x1 <= width && 0 <= y0 && y0 <= y1 && y1 <= height, "a box inside the mask")?;
    let (size, bounds) = ([height as usize, width as usize], [x0, y0, x1, y1].map(|side| side as usize));
    Ok(Mask { encoding: map.at("encoding")?.text()?, data: map.at("data")?.bytes()?, size, bounds })
}

fn parse_instance<'a>(map: &Value<'a>) -> Result<Instance<'a>> {
    Ok(Instance {
        id: map.at("id")?.integer()?, label: map.at("label")?.text()?, score: map.at("score")?.number()?,
        bounds: map.at("box")?.integers()?, area: map.at("area")?.integer()?, state: map.at("state")?.text()?,
        age: map.at("age")?.integer()?, frames_since_seen: map.at("frames_since_seen")?.integer()?,
        confidence: map.find("confidence").map(Value::number).transpose()?,
        doubtful: map.find("doubtful").map_or(Ok(false), Value::bool)?,
        mask: parse_mask(map.at("mask")?)?, fields: map.clone(),
    })
}

pub fn parse_masks<'a>(parts: &[&'a [u8]]) -> Result<MaskMessage<'a>> {
    let body = unpack_body(parts, "masks/", "masks")?;
    Ok(MaskMessage {
        camera: body.at("camera")?.text()?, clock: body.find("clock").map_or(Ok("system"), Value::text)?,
        node: body.find("node").map_or(Ok(""), Value::text)?, model: body.at("model")?.text()?,
        seq: body.at("seq")?.integer()?, capture_ns: body.at("capture_ns")?.integer()?,
        received_ns: body.at("received_ns")?.integer()?, published_ns: body.at("published_ns")?.integer()?,
        width: body.at("width")?.integer()?, height: body.at("height")?.integer()?,
        skipped: body.at("skipped")?.integer()?, epoch: body.find("epoch").map(Value::integer).transpose()?,
        instances: body.at("instances")?.list()?.iter().map(parse_instance).collect::<Result<_>>()?,
    })
}

/// Return the pixels of a mask, row after row: 1 inside, 0 outside.
pub fn decode_mask(mask: &Mask) -> Result<Vec<u8>> {
    let ([height, width], [x0, y0, x1, y1]) = (mask.size, mask.bounds);
    let mut pixels = vec![0; height * width];
    if mask.encoding == "bits+zstd" {
        let count = (x1 - x0) * (y1 - y0);
        let mut bits = vec![0u8; (count + 7) / 8];
        let (from, size) = (mask.data.as_ptr().cast(), mask.data.len());
        if size > 0 || count > 0 {
            // zstd reads `size` bytes, and writes at most as many as `bits` has
            require(unsafe { ZSTD_getFrameContentSize(from, size) } == bits.len() as u64, "bits of the box's size")?;
            let got = unsafe { ZSTD_decompress(bits.as_mut_ptr().cast(), bits.len(), from, size) };
            require(unsafe { ZSTD_isError(got) } == 0 && got == bits.len(), "one whole zstd frame")?;
        }
        for place in 0..count {
            let (row, column) = (y0 + place / (x1 - x0), x0 + place % (x1 - x0));
            pixels[row * width + column] = bits[place / 8] >> (7 - place % 8) & 1;
        }
        return Ok(pixels);
    }
    require(mask.encoding == "rle", "bits+zstd or rle")?;
    let (mut counts, mut place, mut bytes) = (Vec::<i64>::new(), 0, mask.data.iter().peekable());
    while bytes.peek().is_some() {
        let (mut value, mut shift, mut byte) = (0, 0, 0x20);
        while byte & 0x20 != 0 {
            let next = bytes.next().filter(|_| shift < 40).ok_or(Error("expected whole counts of rle".into()))?;
            byte = i64::from(*next) - 48;
            require((0..64).contains(&byte), "rle of the bytes 48 to 111")?;
            value |= (byte & 31) << shift;
            shift += 5;
        }
        value -= if byte & 16 != 0 { 1 << shift } else { 0 };
        value += if counts.len() > 2 { counts[counts.len() - 2] } else { 0 };
        require(0 <= value && value as usize <= height * width - place, "counts of rle up to the mask's size")?;
        let end = place + value as usize;
        for pixel in place..end {
            pixels[pixel % height * width + pixel / height] = (counts.len() % 2) as u8; // down the columns
        }
        place = end;
        counts.push(value);
    }
    require(place == height * width, "counts of rle of the mask's size")?;
    Ok(pixels)
}

// Frames
#[derive(Debug, Clone)]
pub struct Depth<'a> {
    pub width: i64, pub height: i64, pub encoding: &'a str, pub scale_m: f64, pub aligned: bool, pub data: &'a [u8],
}

#[derive(Debug, Clone)]
pub struct Frame<'a> {
    pub camera: &'a str, pub clock: &'a str, pub encoding: &'a str, pub colour: &'a [u8], pub seq: i64,
    pub capture_ns: i64, pub sent_ns: i64, pub width: i64, pub height: i64, pub depth: Option<Depth<'a>>,
    /// The whole header, with intrinsics and times.
    pub header: Value<'a>,
}

pub fn parse_frame<'a>(parts: &[&'a [u8]]) -> Result<Frame<'a>> {
    let header = unpack_body(parts, "frame/", "frame")?;
    require(parts.len() == if header.find("depth").is_some() { 4 } else { 3 }, "a part for each image")?;
    let depth = |map: &Value<'a>| -> Result<Depth<'a>> {
        let (encoding, scale_m) = (map.at("encoding")?.text()?, map.at("scale_m")?.number()?);
        let (width, height) = (map.at("width")?.integer()?, map.at("height")?.integer()?);
        Ok(Depth { width, height, encoding, scale_m, aligned: map.at("aligned")?.bool()?, data: parts[3] })
    };
    Ok(Frame {
        camera: header.at("camera")?.text()?, clock: header.at("clock")?.text()?, colour: parts[2],
        encoding: header.at("encoding")?.text()?, seq: header.at("seq")?.integer()?,
        capture_ns: header.at("capture_ns")?.integer()?, sent_ns: header.at("sent_ns")?.integer()?,
        width: header.at("width")?.integer()?, height: header.at("height")?.integer()?,
        depth: header.find("depth").map(depth).transpose()?, header,
    })
}
