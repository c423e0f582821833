package homearchive

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

var wide = Bounds{Entries: 1000, File: 1 << 20, Total: 8 << 20}

func pack(t *testing.T, entries ...Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := newWriter(&b, wide)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := w.add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func unpack(archive []byte, bounds Bounds) (all []Entry, err error) {
	r, err := newReader(bytes.NewReader(archive), bounds)
	for err == nil {
		var e Entry
		if e, err = r.next(); err == nil {
			all = append(all, e)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

func file(name, content string) Entry {
	return Entry{Name: name, Mode: 0o644, Time: time.Unix(1_700_000_000, 0), Content: []byte(content)}
}

func (e Entry) String() string {
	return fmt.Sprintf("%q %v %d %q", e.Name, e.Mode, e.Time.Unix(), e.Content)
}

// sameEntry compares everything that an archive stores.
func sameEntry(a, b Entry) bool { return a.String() == b.String() }

func TestArchive(t *testing.T) {
	in := []Entry{
		{Name: "dir", Mode: fs.ModeDir | 0o700, Time: time.Unix(0, 0)},
		file("dir/new\nline and \xff\xfe", "\x00\x01\x02"),
		file(strings.Repeat("n", 255)+"/"+strings.Repeat("m", 255), ""),
		{Name: "l", Mode: fs.ModeSymlink | 0o777, Time: time.Unix(1<<40-1, 0), Content: []byte("dir/\xff")},
		{Name: "x", Mode: 0o755, Time: time.Unix(5, 0), Content: bytes.Repeat([]byte("long"), 1<<17)},
	}
	out, err := unpack(pack(t, in...), wide)
	if err != nil {
		t.Errorf("unpack of a packed archive: error %v, want nil", err)
	}
	if diff := cmp.Diff(in, out, cmp.Comparer(sameEntry)); diff != "" {
		t.Errorf("entries after pack and unpack mismatch (-want +got):\n%.4000s", diff)
	}
}

func TestWriterRefuses(t *testing.T) {
	for _, e := range []Entry{
		file("", ""), file("/etc/passwd", ""), file("a/../b", ""), file("a//b", ""), file(".", ""), file("a/", ""), file("a\x00b", ""),
		file(strings.Repeat("n", 256), ""), file(strings.Repeat("a/", 64)+"b", ""), file("large", strings.Repeat("x", 1<<20+1)),
		{Name: "pipe", Mode: fs.ModeNamedPipe},
		{Name: "device", Mode: fs.ModeDevice | fs.ModeCharDevice},
	} {
		w, err := newWriter(io.Discard, wide)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.add(e); err == nil {
			t.Errorf("add of %.80q with mode %v and %d bytes succeeded, want an error", e.Name, e.Mode, len(e.Content))
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	whole := pack(t, file("a", "content"), file("b/c", ""))
	if all, err := unpack(whole, wide); err != nil || len(all) != 2 {
		t.Fatalf("unpack of a whole archive = %v, %v, want 2 entries", all, err)
	}
	for n := range whole {
		if _, err := unpack(whole[:n], wide); err == nil {
			t.Errorf("unpack of the first %d bytes succeeded, want an error", n)
		}
	}
	setuid := pack(t, file("a", ""))
	setuid[len(magic)+3] = 0x09 // 04000 and some bits of 0644
	name := func(s string) []byte {
		return bytes.Replace(pack(t, file("aaaa", "")), []byte("aaaa"), []byte(s), 1)
	}
	for what, b := range map[string][]byte{
		"nothing": nil, "not ours": []byte("hello, world, this is not an archive"), "a shell that prints": append([]byte("hi\n"), whole...),
		"more after the end": append(bytes.Clone(whole), 0), "setuid": setuid,
		"a way out": name("../a"), "an absolute name": name("/etc"), "an empty part": name("a//a"),
	} {
		if all, err := unpack(b, wide); err == nil {
			t.Errorf("%s: unpack = %v, want an error", what, all)
		}
	}
	for what, b := range map[string]Bounds{
		"entries": {1, 100, 1000}, "a file": {10, 6, 1000}, "all": {10, 100, int64(len(whole)) - 1},
	} {
		if _, err := unpack(whole, b); err == nil {
			t.Errorf("unpack beyond the bounds of %s, %+v, succeeded, want an error", what, b)
		}
	}
	if _, err := unpack(whole, Bounds{2, 7, int64(len(whole))}); err != nil {
		t.Errorf("unpack of an archive at its bounds: error %v, want nil", err)
	}
}

// TestWriterAtItsBounds checks that an archive at its bounds is written, and that one
// more byte or entry is refused.
func TestWriterAtItsBounds(t *testing.T) {
	entries := []Entry{file("a", "content"), file("b/c", "")}
	size := int64(len(pack(t, entries...)))
	for _, c := range []struct {
		name   string
		bounds Bounds
		ok     bool
	}{
		{"what just fits", Bounds{2, 7, size}, true},
		{"one entry more", Bounds{1, 7, size}, false},
		{"a larger file", Bounds{2, 6, size}, false},
		{"a byte more", Bounds{2, 7, size - 1}, false},
	} {
		var b bytes.Buffer
		w, err := newWriter(&b, c.bounds)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(w.add(entries[0]), w.add(entries[1]), w.close())
		if (err == nil) != c.ok || int64(b.Len()) > c.bounds.Total {
			t.Errorf("%s: error %v, %d bytes written, want success: %t, at most %d bytes", c.name, err, b.Len(), c.ok, c.bounds.Total)
		}
	}
	if b := pack(t); int64(len(b)) != EmptySize || !IsArchive(b) || IsArchive(b[:len(magic)-1]) {
		t.Errorf("archive without entries: %d bytes, IsArchive %t, of its beginning %t, want %d, true, false", len(b), IsArchive(b), IsArchive(b[:len(magic)-1]), EmptySize)
	}
	old := Entry{Name: "old", Mode: 0o600, Time: time.Unix(-5, 0)}
	if all, err := unpack(pack(t, old), wide); err != nil || len(all) != 1 || all[0].Time.Unix() != 0 {
		t.Errorf("unpack of a file from before 1970 = %v, %v, want one entry with time 0", all, err)
	}
}

// TestValidName checks the limits on the length, the parts and the depth of a name.
func TestValidName(t *testing.T) {
	part := strings.Repeat("p", 255)
	long := strings.Repeat(part+"/", 15) + strings.Repeat("q", 127) + "/" // 3968 bytes
	for name, ok := range map[string]bool{
		part: true, part + "p": false, long + strings.Repeat("r", 128): true, long + strings.Repeat("r", 129): false,
		strings.Repeat("a/", 63) + "b": true, strings.Repeat("a/", 64) + "b": false,
		"..a": true, "a/..": false, "a/.": false, "...": true, "a\x00": false, "": false, "/": false,
	} {
		if got := validName(name); got != ok {
			t.Errorf("validName(%.20q, %d bytes) = %t, want %t", name, len(name), got, ok)
		}
	}
}

// TestReaderRefusesDamage checks that the reader verifies the kind and every byte that
// must be zero.
func TestReaderRefusesDamage(t *testing.T) {
	whole := pack(t, file("a", "content"))
	for _, i := range []int{0, 2, 5, 11, 14, 19} {
		b := bytes.Clone(whole)
		b[len(magic)+i] = 1
		if _, err := unpack(b, wide); err == nil || err.Error() != "the archive is damaged" {
			t.Errorf("unpack with byte %d set to 1: error %v, want %q", i, err, "the archive is damaged")
		}
	}
	kind, name, mode := bytes.Clone(whole), bytes.Clone(whole), bytes.Clone(whole)
	kind[len(magic)+1] = 'x'
	name[len(magic)+headerLen+1] = 'b'
	mode[len(magic)+3] = 0x08
	for want, b := range map[string][]byte{
		"the archive is damaged": kind, "the archive has an invalid name": name, "the archive has a mode with more than permission bits": mode,
		"the input is not an archive": []byte("hello, world"), "the archive was cut off": whole[:len(magic)-1],
		"data follows the archive's end": append(bytes.Clone(whole), 0),
	} {
		if _, err := unpack(b, wide); err == nil || err.Error() != want {
			t.Errorf("unpack of a damaged archive: error %v, want %q", err, want)
		}
	}
	broken := io.MultiReader(bytes.NewReader(whole[:len(whole)-3]), iotest.ErrReader(io.ErrClosedPipe))
	r, err := newReader(broken, wide)
	for err == nil {
		_, err = r.next()
	}
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("reading a broken stream: error %v, want %v", err, io.ErrClosedPipe)
	}
	if _, err := newReader(strings.NewReader("hello, world"), wide); err == nil {
		t.Errorf("newReader of %q succeeded, want an error", "hello, world")
	}
	if _, err := newReader(iotest.ErrReader(io.ErrClosedPipe), wide); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("newReader of a stream that fails: error %v, want %v", err, io.ErrClosedPipe)
	}
}

// TestReaderTakesNoMoreMemoryThanComes checks that a claimed size costs no memory
// before the data arrives.
func TestReaderTakesNoMoreMemoryThanComes(t *testing.T) {
	b := pack(t, file("a", "x"))
	copy(b[len(magic)+15:], []byte{0x3f, 0xff, 0xff, 0xff})
	huge := Bounds{Entries: 10, File: 1 << 31, Total: 1 << 40}
	before := allocated()
	if _, err := unpack(b, huge); err == nil {
		t.Error("unpack of a truncated archive succeeded, want an error")
	}
	if n := allocated() - before; n > 1<<20 {
		t.Errorf("unpack of %d bytes allocated %d bytes, want at most %d", len(b), n, 1<<20)
	}
}

// TestArchiveSurvivesMasking checks that the host may overwrite any secret and the rest
// is read as it was written.
func TestArchiveSurvivesMasking(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 5))
	alphabet := []string{"0", "1", "a", "b", "home1", "d", "f", "l", "e", "\x01", "\xff", "/", "\n"}
	text := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(alphabet[rnd.IntN(len(alphabet))])
		}
		return b.String()
	}
	for range 300 {
		var in []Entry
		for range 1 + rnd.IntN(4) {
			e := file("n"+strings.ReplaceAll(text(rnd.IntN(20)), "/", "-"), text(rnd.IntN(400)))
			e.Time, e.Mode = time.Unix(rnd.Int64N(1<<40), 0), fs.FileMode(rnd.IntN(0o1000))
			in = append(in, e)
		}
		value := text(6 + rnd.IntN(6))
		if rnd.IntN(2) == 0 { // a value that occurs in the archive
			if c := string(in[0].Content); len(c) > 20 {
				value = c[3:14]
			}
		}
		archive := pack(t, in...)
		var masked bytes.Buffer
		w := secret.NewRedactor(secret.NewValue(value)).Mask(&masked)
		for rest := archive; len(rest) > 0; {
			n := 1 + rnd.IntN(min(len(rest), 40))
			if _, err := w.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if masked.Len() != len(archive) {
			t.Fatalf("masked archive has %d bytes, want %d", masked.Len(), len(archive))
		}
		out, err := unpack(masked.Bytes(), wide)
		if err != nil || len(out) != len(in) {
			t.Fatalf("secret %q: %d entries, %v, want %d", value, len(out), err, len(in))
		}
		for i, e := range in {
			o := out[i]
			if o.Mode != e.Mode || !o.Time.Equal(e.Time) || len(o.Name) != len(e.Name) || len(o.Content) != len(e.Content) {
				t.Fatalf("secret %q: masked entry %v, want mode, time and lengths of %v", value, o, e)
			}
			if v := strings.TrimRight(value, "\r\n"); len(v) >= 6 && strings.Trim(v, "*") != "" && bytes.Contains(o.Content, []byte(v)) {
				t.Fatalf("secret %q: masked entry %v contains it, want it overwritten", value, o)
			}
		}
	}
}

func FuzzArchive(f *testing.F) {
	f.Add([]byte(magic))
	f.Add(append([]byte(magic), make([]byte, 40)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := unpack(b, wide)
		if err != nil {
			return
		}
		// An archive that is accepted is the same as one that would be written.
		var again bytes.Buffer
		w, err := newWriter(&again, wide)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if err := w.add(e); err != nil {
				t.Fatalf("add of an accepted entry %v: %v", e, err)
			}
		}
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		if len(b) != again.Len() {
			t.Fatalf("unpack accepted %q, want the length of its own form, %q", b, again.Bytes())
		}
	})
}
