package script

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// What packages do before main is done by every command, each prompt that asks
// for a completion, and three processes of every session, for whose lifetime
// they hold the memory. Bytes are counted, not time: they are the same everywhere.
func TestLittleHappensBeforeMain(t *testing.T) {
	const (
		most    = 1 << 20 // of one package
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
		// It fills seven megabytes of tables, which are not allocated and not in the count.
		if m[1] == "github.com/google/gopacket/layers" {
			t.Error("the real gopacket is linked; see third_party/gopacket")
		}
	}
	if sum > mostSum {
		t.Errorf("%d bytes are allocated before main", sum)
	}
}
