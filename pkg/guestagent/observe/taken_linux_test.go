package observe

import (
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// TestTakenAnswersAreReported reads the questions while their answers are taken. No read may miss a question both
// among the open ones and among those whose answer was taken: the host would take it for withdrawn.
func TestTakenAnswersAreReported(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	self, ok := sys.ProcessAt(os.Getpid())
	if !ok {
		t.Fatal("cannot read /proc")
	}
	for range 300 {
		q, err := question{Question: guestproto.Question{Kind: guestproto.AskText, Text: "?"}}.raise(g, self)
		if err == nil {
			err = os.WriteFile(questionPath(g, q.ID, answerFile), []byte("yes"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		var taking sync.WaitGroup
		taking.Go(func() { takeAnswer(g, q.ID) })
		for range 5 {
			open, taken := readQuestions(g)
			if !slices.Contains(taken, q.ID) && !slices.ContainsFunc(open, func(o question) bool { return o.ID == q.ID }) {
				t.Fatalf("question %s is neither open nor among the answers that were taken", q.ID)
			}
		}
		taking.Wait()
	}
}
