package guestproto

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
)

// MaxFrame limits the content of a frame, in bytes.
const MaxFrame = 256 << 10

// FrameKind says what a frame contains.
type FrameKind byte

// These are the kinds of frames. The command decides which of them its stream has.
const (
	FrameStdout   FrameKind = 'o' // the next bytes of the agent's output
	FrameStderr   FrameKind = 'e'
	FrameStatus   FrameKind = 's' // TaskStatus
	FrameArtifact FrameKind = 'a' // Artifact
	FrameEnd      FrameKind = 'z' // after the artifacts: a Collection without them; after a file: empty
	FrameItem     FrameKind = 'i' // SendItem: a file begins
	FrameData     FrameKind = 'd' // the next bytes of that file
	FrameFailure  FrameKind = 'f' // Failure
	FrameBeat     FrameKind = 'b' // empty; shows a waiting host that the guest is alive
)

// frameKinds lists all kinds, with the maximum size of each.
var frameKinds = map[FrameKind]int{
	FrameStdout: MaxFrame, FrameStderr: MaxFrame, FrameData: MaxFrame, FrameArtifact: 32 << 10, FrameStatus: maxTaskStatus,
	FrameEnd: 1024, FrameItem: 1024, FrameFailure: 4096, FrameBeat: 0,
}

// Frame is one piece of a guest's stream.
type Frame struct {
	Kind FrameKind
	Data []byte // valid until the next frame
}

// Failure says why a guest cannot do what was requested, for the cases that the host
// handles differently.
type Failure struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// These are the kinds of failures.
const (
	// FailureTruncated means that a file is shorter than it was.
	FailureTruncated = "truncated"

	// FailureNoCollection means that a collection does not exist, or no longer
	// exists.
	FailureNoCollection = "no-collection"

	// FailureItem means that one file cannot be sent; the other files are not
	// affected.
	FailureItem = "item"
)

// DecodeFailure reads the content of a frame.
func DecodeFailure(text []byte) (Failure, error) {
	f, err := decode[Failure](strings.NewReader(string(text)), MaxFrame)
	if err != nil {
		return Failure{}, fmt.Errorf("failure: %w", err)
	}
	return Failure{Kind: Clean(f.Kind), Text: Clean(f.Text)}, nil
}

// WriteFrame writes a frame with one call of Write.
func WriteFrame(w io.Writer, kind FrameKind, data []byte) error {
	if most, known := frameKinds[kind]; !known || len(data) > most {
		return fmt.Errorf("got a frame %q of %d bytes", rune(kind), len(data))
	}
	frame := make([]byte, frameHeader, frameHeader+len(data))
	frame[0] = byte(kind)
	binary.BigEndian.PutUint32(frame[1:], uint32(len(data)))
	_, err := w.Write(append(frame, data...))
	return err
}

const frameHeader = 5

// Frames reads frames until r ends. It stops after the first error; a stream that
// ends between two frames is complete.
func Frames(r io.Reader) iter.Seq2[Frame, error] {
	return func(yield func(Frame, error) bool) {
		in := bufio.NewReaderSize(r, 32<<10)
		var header [frameHeader]byte
		var buf []byte
		for {
			_, err := io.ReadFull(in, header[:])
			if errors.Is(err, io.EOF) {
				return
			}
			f := Frame{Kind: FrameKind(header[0])}
			n := int(binary.BigEndian.Uint32(header[1:]))
			if err == nil {
				most, known := frameKinds[f.Kind]
				switch {
				case !known:
					err = fmt.Errorf("unknown kind %q", rune(f.Kind))
				case n > most:
					err = fmt.Errorf("kind %q with %d bytes", rune(f.Kind), n)
				}
			}
			if err == nil {
				if cap(buf) < n {
					buf = make([]byte, max(n, 4096))
				}
				f.Data = buf[:n]
				_, err = io.ReadFull(in, f.Data)
				if errors.Is(err, io.EOF) && n > 0 {
					err = io.ErrUnexpectedEOF
				}
			}
			if err != nil {
				yield(Frame{}, fmt.Errorf("frame: %w", err))
				return
			}
			if !yield(f, nil) {
				return
			}
		}
	}
}
