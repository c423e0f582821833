package script

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// TestLittleHappensBeforeMain limits what packages do before main. Every command pays for
// it, as does each prompt that requests a completion. Three processes of every session hold
// that memory for their lifetime. The test counts bytes, not time, because bytes are the
// same everywhere.
func TestLittleHappensBeforeMain(t *testing.T) {
	const (
		most    = 1 << 20 // for one package
		mostSum = 4 << 20
	)
	cmd := exec.CommandContext(t.Context(), binary, "--help")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1", "HOME="+t.TempDir())
	var trace bytes.Buffer
	cmd.Stderr = &trace
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^init (\S+) @.* clock, (\d+) bytes`).FindAllStringSubmatch(trace.String(), -1)
	if len(found) < 50 {
		t.Fatalf("only %d packages are told of:\n%s", len(found), trace.String())
	}
	sum := 0
	for _, m := range found {
		n, _ := strconv.Atoi(m[2])
		if sum += n; n > most {
			t.Errorf("%s allocates %d bytes before main", m[1], n)
		}
		// The real package fills seven megabytes of tables, which are not allocated and
		// thus not counted.
		if m[1] == "github.com/google/gopacket/layers" {
			t.Error("the real gopacket is linked; see third_party/gopacket")
		}
	}
	if sum > mostSum {
		t.Errorf("%d bytes are allocated before main", sum)
	}
}
