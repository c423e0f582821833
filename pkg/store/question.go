package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Question is something that waits for a person's answer, or did.
type Question struct {
	ID      string   `json:"id"`
	Session string   `json:"session"` // id
	GuestID string   `json:"-"`       // id within the session, chosen by the guest
	Kind    string   `json:"kind"`
	Agent   string   `json:"agent,omitempty"` // program that asks
	Tool    string   `json:"tool,omitempty"`  // that asks for permission
	Text    string   `json:"text"`
	Choices []string `json:"choices,omitempty"`
	Only    bool     `json:"only,omitempty"`  // no text but a choice answers it
	Parts   int      `json:"parts,omitempty"` // number of questions in the text, if several

	State      QuestionState `json:"state"`
	AskedAt    time.Time     `json:"asked_at"`
	Deadline   time.Time     `json:"deadline,omitzero"` // when it ends, or is answered with Preset
	Preset     string        `json:"preset,omitempty"`
	Answer     string        `json:"answer,omitempty"`
	By         string        `json:"by,omitempty"` // who answered
	AnsweredAt time.Time     `json:"answered_at,omitzero"`
}

// QuestionState is where a question is in its life.
//
//	open ──► answered ──► delivered
//	  └─────────┴──► closed
type QuestionState string

// The states of questions.
const (
	QuestionOpen      QuestionState = "open"
	QuestionAnswered  QuestionState = "answered"  // the answer is not delivered yet
	QuestionDelivered QuestionState = "delivered" // the program that asked took the answer
	QuestionClosed    QuestionState = "closed"    // it no longer waits: answered in its terminal, or ended
)

// The kinds of the questions that the gateway asks, not the guest.
const (
	QuestionNetwork = "network" // whether a connection may go on
	QuestionBudget  = "budget"  // what the limit in Tool becomes, which is used up
)

// OfGateway reports whether the gateway asks, not the guest.
func (q Question) OfGateway() bool { return q.Kind == QuestionNetwork || q.Kind == QuestionBudget }

// Waits reports whether the program that asked still waits.
func (s QuestionState) Waits() bool { return s == QuestionOpen || s == QuestionAnswered }

// Finished questions are kept as history within these limits.
const (
	questionsPerSession = 200
	questionsKept       = 5000
)

// The program that asks has ended when its session no longer runs.
const questionColumns = `q.id, q.session, q.guest_id, q.kind, q.agent, q.tool, q.text, q.choices, q.only, q.parts,
	CASE WHEN q.state IN ('open', 'answered') AND s.phase <> 'ready' THEN 'closed' ELSE q.state END, q.asked_at, q.deadline, q.preset, q.answer, q.by, q.answered_at
	FROM questions q JOIN sessions s ON s.id = q.session`

func scanQuestion(row scanner) (q Question, err error) {
	var choices string
	var asked, deadline, answered int64
	if err := row.Scan(&q.ID, &q.Session, &q.GuestID, &q.Kind, &q.Agent, &q.Tool, &q.Text, &choices, &q.Only, &q.Parts, &q.State, &asked, &deadline, &q.Preset, &q.Answer, &q.By, &answered); err != nil {
		return q, err
	}
	q.AskedAt = moment(asked)
	if deadline != 0 {
		q.Deadline = moment(deadline)
	}
	if answered != 0 {
		q.AnsweredAt = moment(answered)
	}
	return q, json.Unmarshal([]byte(choices), &q.Choices)
}

// SyncQuestions makes the questions of a session that wait, and for which ours returns true,
// those that are asked: it adds new ones, and ends those that are missing. taken has the
// guest's ids of questions whose answer was delivered. note returns the events about the
// questions that changed; it gets the session's row as in Update. SyncQuestions returns the
// questions that wait.
func (s *Store) SyncQuestions(ctx context.Context, session string, asked []Question, taken []string, ours func(Question) bool, note func(row *Session, changed []Question) ([]Event, error)) (waiting []Question, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		waiting = nil
		var row Session
		if err := row.load(ctx, tx, session); err != nil {
			return err
		}
		known, err := collect(ctx, tx, scanQuestion, `SELECT `+questionColumns+` WHERE q.session = ? ORDER BY q.num`, session)
		if err != nil {
			return err
		}
		var changed []Question
		for _, q := range known {
			if !q.State.Waits() || !ours(q) {
				continue
			}
			if slices.ContainsFunc(asked, func(a Question) bool { return a.GuestID == q.GuestID }) {
				waiting = append(waiting, q)
				continue
			}
			end := QuestionClosed
			if q.State == QuestionAnswered && slices.Contains(taken, q.GuestID) {
				end = QuestionDelivered
			}
			q.State = end
			if _, err := tx.ExecContext(ctx, `UPDATE questions SET state = ? WHERE id = ?`, q.State, q.ID); err != nil {
				return fmt.Errorf("end question %s: %w", q.ID, err)
			}
			changed = append(changed, q)
		}
		for _, q := range asked {
			if slices.ContainsFunc(known, func(k Question) bool { return k.GuestID == q.GuestID }) {
				continue // also one that has ended: an id is used once
			}
			q.Session, q.State, q.AskedAt = session, QuestionOpen, now()
			var deadline int64
			if !q.Deadline.IsZero() {
				deadline = q.Deadline.UnixMilli()
			}
			choices, err := json.Marshal(q.Choices)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO questions (id, session, guest_id, kind, agent, tool, text, choices, only, parts, state, asked_at, deadline, preset, answer, by, answered_at)
				VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', '', 0)`,
				q.ID, q.Session, q.GuestID, q.Kind, q.Agent, q.Tool, q.Text, string(choices), q.Only, q.Parts, q.State, q.AskedAt.UnixMilli(), deadline, q.Preset); err != nil {
				return fmt.Errorf("add question: %w", err)
			}
			waiting, changed = append(waiting, q), append(changed, q)
		}
		if len(changed) == 0 {
			return nil
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM questions WHERE (state IN ('delivered', 'closed') OR session IN (SELECT id FROM sessions WHERE phase = 'gone')) AND (
			num <= (SELECT num FROM questions ORDER BY num DESC LIMIT 1 OFFSET ?2) OR
			session = ?1 AND num <= (SELECT num FROM questions WHERE session = ?1 ORDER BY num DESC LIMIT 1 OFFSET ?3))`, session, questionsKept, questionsPerSession); err != nil {
			return fmt.Errorf("remove old questions: %w", err)
		}
		return change(ctx, tx, session, &row, func(row *Session) ([]Event, error) { return note(row, changed) })
	})
	return waiting, err
}

// AnswerQuestion answers an open question. Of several answers only the first succeeds; the
// others get fail.Conflict. check may normalize the answer, or refuse it; event describes the
// change.
func (s *Store) AnswerQuestion(ctx context.Context, id, by string, check func(Question) (answer string, err error), event func(Question) Event) (q Question, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		if q, err = question(ctx, tx, id); err != nil {
			return err
		}
		switch {
		case q.State == QuestionClosed:
			return fail.New(fail.Conflict, "question %s has ended: it was answered in the terminal, or the program that asked has ended", id).WithHint("agent-sessionizer answer")
		case q.State != QuestionOpen:
			return fail.New(fail.Conflict, "question %s was already answered by %s: %s", id, q.By, q.Answer).WithHint("agent-sessionizer answer")
		}
		if q.Answer, err = check(q); err != nil {
			return err
		}
		q.State, q.By, q.AnsweredAt = QuestionAnswered, by, now()
		if _, err := tx.ExecContext(ctx, `UPDATE questions SET state = ?, answer = ?, by = ?, answered_at = ? WHERE id = ?`,
			q.State, q.Answer, q.By, q.AnsweredAt.UnixMilli(), id); err != nil {
			return fmt.Errorf("answer question %s: %w", id, err)
		}
		return appendEvents(ctx, tx, q.Session, []Event{event(q)})
	})
	return q, err
}

// ReuseQuestionIDs lets the guest of a session ask the questions that have ended again, as new ones.
// It is called when the guest returns to an earlier state, in which a program may wait for an answer
// that it has already got.
func (s *Store) ReuseQuestionIDs(ctx context.Context, session string) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE questions SET guest_id = 'earlier:' || id
			WHERE session = ? AND state IN ('delivered', 'closed') AND kind NOT IN ('network', 'budget')`, session)
		return err
	})
}

// Question returns one question, or fail.NotFound when it does not exist.
func (s *Store) Question(ctx context.Context, id string) (q Question, err error) {
	err = s.db.retryBusy(ctx, func() error {
		q, err = question(ctx, s.db.sql, id)
		return err
	})
	return q, err
}

func question(ctx context.Context, from queryer, id string) (Question, error) {
	q, err := scanQuestion(from.QueryRowContext(ctx, `SELECT `+questionColumns+` WHERE q.id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		err = fail.New(fail.NotFound, "no question %s", id).WithHint("agent-sessionizer answer")
	}
	return q, err
}

// Questions returns the questions of a session, or of all sessions if it is "": those that
// wait, or all that are kept; the oldest first.
func (s *Store) Questions(ctx context.Context, session string, all bool) (list []Question, err error) {
	query, args := `SELECT `+questionColumns+` WHERE 1`, []any{}
	if !all {
		query += ` AND q.state IN ('open', 'answered') AND s.phase = 'ready'`
	}
	if session != "" {
		query, args = query+` AND q.session = ?`, append(args, session)
	}
	err = s.db.retryBusy(ctx, func() error {
		list, err = collect(ctx, s.db.sql, scanQuestion, query+` ORDER BY q.num`, args...)
		return err
	})
	return list, err
}
