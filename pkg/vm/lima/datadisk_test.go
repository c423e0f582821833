package lima

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A guest writes the header of an image that names a file of the host into its raw disk.
func TestARawDataDiskIsNoImage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "datadisk")
	for _, begin := range []string{"QFI\xfb\x00\x00\x00\x03", "KDMV", "vhdxfile", fmt.Sprintf("%064d\x7f\x10\xda\xbe", 0)} {
		if err := os.WriteFile(file, append([]byte(begin), make([]byte, 1024)...), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := checkRawDisk(file); fail.CodeOf(err) != fail.Policy {
			t.Errorf("disk that begins with %q = %v, want code %v", begin, err, fail.Policy)
		}
	}
	for _, begin := range []string{"", "QFI", "\x00\x00"} {
		if err := os.WriteFile(file, []byte(begin), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := checkRawDisk(file); err != nil {
			t.Errorf("disk that begins with %q = %v, want no error", begin, err)
		}
	}
}
