// Package homearchive defines which parts of a home directory travel between host and
// guest: the user's dotfiles into a guest, and the saved home of a session into the next
// session of its repository. It owns the archive format, its bounds, and the list of
// files that are credentials, which do not travel.
//
// Both the host program and the guest program use it. Neither accesses files outside
// the given directory, writes through a link, or trusts a name, size or mode from the
// other side.
package homearchive

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"
)

// Entry is a directory, a file or a symbolic link.
type Entry struct {
	Name    string      // below the home directory; any bytes except NUL
	Mode    fs.FileMode // only type and permissions
	Time    time.Time   // modification time of a file, in seconds
	Content []byte      // content of a file, or target of a link
}

// Bounds limits the size of an archive.
type Bounds struct {
	Entries int
	File    int64 // bytes of one file
	Total   int64 // bytes of the archive
}

// An archive is a sequence of entries between magic and an end marker. It is not a tar,
// because a filter on the host overwrites secrets in a saved home in place
// (secret.Redactor.Mask) without knowing the format: a changed name would break the
// checksum of a tar header, and a secret of digits its sizes. In this format a header
// has a zero byte at least every six bytes. No secret contains a zero byte, and the
// filter ignores shorter secrets, so masking never damages a header.
const (
	magic = "\x00home1\x00"

	// zero, kind, zero, permissions (2), zero, time (5), zero, length of the name (2),
	// zero, length of the content (4), zero; then name, zero, content.
	headerLen = 20
	maxName   = 4096
	maxDepth  = 64
)

const (
	kindDir  = 'd'
	kindFile = 'f'
	kindLink = 'l'
	kindEnd  = 'e' // a header with zeros otherwise; an archive without it was truncated
)

// EmptySize is the size of an archive without entries.
const EmptySize = int64(len(magic) + headerLen)

// IsArchive reports whether b begins like an archive.
func IsArchive(b []byte) bool { return bytes.HasPrefix(b, []byte(magic)) }

// writer writes an archive. It does not close the underlying writer.
type writer struct {
	w       io.Writer
	bounds  Bounds
	entries int
	written int64
}

func newWriter(w io.Writer, b Bounds) (*writer, error) {
	out := &writer{w: w, bounds: b}
	return out, out.write([]byte(magic))
}

// frame returns the size of an entry without its content.
func frame(name string) int64 { return headerLen + int64(len(name)) + 1 }

// fits reports whether another entry fits, with the end marker after it.
func (w *writer) fits(name string, size int64) bool {
	return w.entries < w.bounds.Entries && w.written+frame(name)+size+headerLen <= w.bounds.Total
}

func (w *writer) add(e Entry) error {
	kind, err := kindOf(e.Mode)
	if err != nil || !validName(e.Name) {
		return fmt.Errorf("%q cannot be archived", e.Name)
	}
	if int64(len(e.Content)) > w.bounds.File {
		return fmt.Errorf("%q is larger than %d bytes", e.Name, w.bounds.File)
	}
	if !w.fits(e.Name, int64(len(e.Content))) {
		return fmt.Errorf("%q exceeds the limit of %d files or %d bytes", e.Name, w.bounds.Entries, w.bounds.Total)
	}
	w.entries++
	return errors.Join(w.write(header(kind, e)), w.write([]byte(e.Name+"\x00")), w.write(e.Content))
}

// close writes the end marker.
func (w *writer) close() error { return w.write(header(kindEnd, Entry{})) }

func (w *writer) write(b []byte) error {
	n, err := w.w.Write(b)
	w.written += int64(n)
	return err
}

func kindOf(m fs.FileMode) (byte, error) {
	switch m.Type() {
	case 0:
		return kindFile, nil
	case fs.ModeDir:
		return kindDir, nil
	case fs.ModeSymlink:
		return kindLink, nil
	}
	return 0, errors.New("not a file, directory or link")
}

func header(kind byte, e Entry) []byte {
	b := make([]byte, headerLen)
	b[1] = kind
	binary.BigEndian.PutUint16(b[3:], uint16(e.Mode.Perm()))
	var sec [8]byte
	binary.BigEndian.PutUint64(sec[:], uint64(max(e.Time.Unix(), 0)))
	copy(b[6:11], sec[3:])
	binary.BigEndian.PutUint16(b[12:], uint16(len(e.Name)))
	binary.BigEndian.PutUint32(b[15:], uint32(len(e.Content)))
	return b
}

// reader reads an archive. It does not trust the input.
type reader struct {
	r       *bufio.Reader
	bounds  Bounds
	entries int
	read    int64
}

func newReader(r io.Reader, b Bounds) (*reader, error) {
	in := &reader{r: bufio.NewReader(r), bounds: b}
	start, err := in.readN(int64(len(magic)))
	if err == nil && !IsArchive(start) {
		err = errors.New("the input is not an archive")
	}
	return in, err
}

// next returns the next entry, or io.EOF after the end marker. It returns any other
// error for input that is not a complete archive within the bounds.
func (r *reader) next() (Entry, error) {
	h, err := r.readN(headerLen)
	if err != nil {
		return Entry{}, err
	}
	for _, i := range []int{0, 2, 5, 11, 14, 19} {
		if h[i] != 0 {
			return Entry{}, errors.New("the archive is damaged")
		}
	}
	if h[1] == kindEnd {
		if _, err := r.r.ReadByte(); !errors.Is(err, io.EOF) {
			return Entry{}, errors.New("data follows the archive's end")
		}
		return Entry{}, io.EOF
	}
	mode := fs.FileMode(binary.BigEndian.Uint16(h[3:]))
	e := Entry{Mode: mode.Perm(), Time: time.Unix(int64(binary.BigEndian.Uint64(append([]byte{0, 0, 0}, h[6:11]...))), 0)}
	switch h[1] {
	case kindDir:
		e.Mode |= fs.ModeDir
	case kindLink:
		e.Mode |= fs.ModeSymlink
	case kindFile:
	default:
		return Entry{}, errors.New("the archive is damaged")
	}
	if mode != mode.Perm() {
		return Entry{}, errors.New("the archive has a mode with more than permission bits")
	}
	if r.entries++; r.entries > r.bounds.Entries {
		return Entry{}, fmt.Errorf("the archive has more than %d entries", r.bounds.Entries)
	}
	size := int64(binary.BigEndian.Uint32(h[15:]))
	if size > r.bounds.File {
		return Entry{}, fmt.Errorf("the archive has a file of %d bytes, more than %d", size, r.bounds.File)
	}
	name, err := r.readN(int64(binary.BigEndian.Uint16(h[12:])) + 1)
	if err != nil {
		return Entry{}, err
	}
	e.Name = string(name[:len(name)-1])
	if !validName(e.Name) || name[len(name)-1] != 0 {
		return Entry{}, errors.New("the archive has an invalid name")
	}
	e.Content, err = r.readN(size)
	return e, err
}

// readN reads n bytes. It allocates no more memory than the received data needs.
func (r *reader) readN(n int64) ([]byte, error) {
	if r.read += n; r.read > r.bounds.Total {
		return nil, fmt.Errorf("the archive is larger than %d bytes", r.bounds.Total)
	}
	var b bytes.Buffer
	if _, err := io.CopyN(&b, r.r, n); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("the archive was cut off")
		}
		return nil, err
	}
	return b.Bytes(), nil
}

// validName reports whether a name stays below the directory that it is placed in.
// Unlike fs.ValidPath, it accepts bytes that are not UTF-8, as file systems do.
func validName(name string) bool {
	if len(name) > maxName || strings.Contains(name, "\x00") || strings.Count(name, "/") >= maxDepth {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." || len(part) > 255 {
			return false
		}
	}
	return true
}
