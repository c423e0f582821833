package recording

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// BenchmarkSearch searches 1 GiB of text of 64 sessions, once it is in the page cache: for a text that is rare, for one
// in lower case, and for one that is everywhere. grep shows what the files cost to read.
func BenchmarkSearch(b *testing.B) {
	const subjects, partsEach, size = 64, 4, 4 << 20
	s := Store{Dir: b.TempDir()}
	var text bytes.Buffer
	for i := 0; text.Len() < size; i++ {
		fmt.Fprintf(&text, "%d\tok  \tgithub.com/example/project/pkg/part%d\t%d.%03ds  coverage: %d.%d%% of statements\n", i*37, i%97, i%9, i%1000, i%100, i%10)
	}
	for i := range subjects {
		dir := s.Subject(fmt.Sprintf("%012x", i))
		check(b, os.MkdirAll(dir, 0o700))
		for n := range partsEach {
			p := part{dir: dir, number: 0, serial: n + 1}
			check(b, os.WriteFile(p.cast(), []byte(`{"version":2,"width":80,"height":24,"timestamp":1700000000}`+"\n"), 0o600))
			content := text.Bytes()
			if i == 7 && n == 2 {
				content = append([]byte("5\tthe Needle in it\n"), content...)
			}
			check(b, os.WriteFile(p.text(), content, 0o600))
		}
	}
	if _, _, err := s.Search(b.Context(), Query{Text: "absent", Limit: 1}); err != nil { // reads all files once
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		q    Query
		want int
	}{
		{"rare", Query{Text: "the Needle in it", Limit: 100}, 1},
		{"ignore case", Query{Text: "THE NEEDLE in", Limit: 100, IgnoreCase: true}, 1},
		{"absent", Query{Text: "coverage: none", Limit: 100}, 0},
		{"everywhere", Query{Text: "coverage", Limit: 100}, 100},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(subjects * partsEach * size)
			for b.Loop() {
				if found, _, err := s.Search(b.Context(), c.q); err != nil || len(found) != c.want {
					b.Fatalf("Search = %d matches, %v, want %d", len(found), err, c.want)
				}
			}
		})
	}
	b.Run("grep", func(b *testing.B) {
		b.SetBytes(subjects * partsEach * size)
		for b.Loop() {
			cmd := exec.Command("grep", "-rF", "--include=*.txt", "the Needle in it", s.Dir)
			cmd.Env = append(os.Environ(), "LC_ALL=C")
			if out, err := cmd.Output(); err != nil || strings.Count(string(out), "\n") != 1 {
				b.Fatalf("grep = %q, %v", out, err)
			}
		}
	})
}
